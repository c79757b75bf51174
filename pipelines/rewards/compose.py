"""The reward of a rollout as a weighted sum of named parts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def compose(parts: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Sum of weight x part over the parts, float64 (R,).

    parts: name -> (R,) values. Raises ValueError when a part has no weight, another length
    or a value that is not finite.
    """
    lengths = {name: len(values) for name, values in parts.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the reward parts have different lengths: {lengths}; each needs one value per rollout")
    total = np.zeros(next(iter(lengths.values())))
    for name, values in parts.items():
        if not np.isfinite(values).all():
            raise ValueError(
                f"reward part {name!r} has {int((~np.isfinite(values)).sum())} values that are NaN or infinite"
            )
        if name not in weights:
            raise ValueError(f"reward part {name!r} has no weight; there are weights for {sorted(weights)}")
        total += weights[name] * values
    return total
