"""Group-relative advantages. Legend: P problems, G rollouts of one problem."""

from __future__ import annotations

import numpy as np

_STD_FLOOR = 1e-4


def group_advantages(rewards_P_G: np.ndarray, scale: str) -> np.ndarray:
    """advantages_P_G: reward minus the mean of its group, optionally over the group's standard deviation.

    scale "none": A = r - mean (Liu et al. 2025, "Understanding R1-Zero-like training", Dr. GRPO).
    scale "group_std": A = (r - mean) / (std + 1e-4), unbiased std (Shao et al. 2024, DeepSeekMath, section 4.1.2).
    Raises ValueError for a group of one (its advantage would always be 0) and for rewards that are not finite.
    """
    if rewards_P_G.ndim != 2 or rewards_P_G.shape[1] < 2:
        raise ValueError(
            f"a group baseline needs at least two rollouts per problem, got rewards of shape {rewards_P_G.shape}"
        )
    if not np.isfinite(rewards_P_G).all():
        raise ValueError(
            f"{int((~np.isfinite(rewards_P_G)).sum())} rewards are NaN or infinite; a reward must be a finite number"
        )
    centred_P_G = rewards_P_G - rewards_P_G.mean(axis=1, keepdims=True)
    if scale == "group_std":
        return centred_P_G / (rewards_P_G.std(axis=1, ddof=1, keepdims=True) + _STD_FLOOR)
    return centred_P_G


def informative_groups(correct_P_G: np.ndarray) -> np.ndarray:
    """informative_P: groups with both right and wrong rollouts.

    Judged on the binary outcome, not on the shaped reward: a shaped reward varies inside groups that are all right or
    all wrong, and would keep a gradient alive that has nothing to teach (dynamic sampling: DAPO, Yu et al. 2025, 3.2).
    """
    right_P = correct_P_G.sum(axis=1)
    return (right_P > 0) & (right_P < correct_P_G.shape[1])
