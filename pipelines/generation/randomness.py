"""Counter-based random numbers: the number of (key, position) is the same in any batch and any order.

SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure 16) of a counter.
"""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(keys_B: np.ndarray, positions_B: np.ndarray | int) -> np.ndarray:
    """One float64 in [0, 1) per key, for the position of each.

    keys_B: uint64 of shape (B,). Consecutive positions of one key are a SplitMix64 stream.
    """
    with np.errstate(over="ignore"):
        z = keys_B + _GAMMA * np.asarray(positions_B + 1, dtype=np.uint64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53
