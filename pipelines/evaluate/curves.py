"""What the plots need of the earlier stages: RL training step by step, and the filter's pass rates.

S steps · B pass-rate bins · L levels
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipelines.evaluate.summary import column, completion_lengths

_MOST_BINS = 10


@dataclass(frozen=True)
class TrainingCurve:
    """Means over the rollouts of each optimiser step of one RL round, all with shape S."""

    step: NDArray[np.int64]
    correct: NDArray[np.float64]
    reward: NDArray[np.float64]
    tokens: NDArray[np.float64]
    uniform_groups: NDArray[np.float64]  # share of groups without a difference to learn from
    families: dict[str, NDArray[np.float64]]  # share correct; NaN at a step without a problem of the family


def training_curve(rollouts: pa.Table) -> TrainingCurve:
    """The curve of one round from its records.ROLLOUT table.

    Columns read: step, family, group, correct, reward, action_mask.
    """
    steps, index_R = np.unique(column(rollouts, "step"), return_inverse=True)
    correct_R = column(rollouts, "correct").astype(float)

    def mean(value_R: NDArray, chosen_R: NDArray | slice = slice(None)) -> NDArray[np.float64]:
        total_S = np.bincount(index_R[chosen_R], weights=value_R[chosen_R], minlength=len(steps))
        count_S = np.bincount(index_R[chosen_R], minlength=len(steps))
        return np.divide(total_S, count_S, out=np.full(len(steps), np.nan), where=count_S > 0)

    _, first_G, group_R = np.unique(column(rollouts, "group"), return_index=True, return_inverse=True)
    share_G = np.bincount(group_R, weights=correct_R) / np.bincount(group_R)
    uniform_R = np.zeros(rollouts.num_rows)
    uniform_R[first_G] = (share_G == 0) | (share_G == 1)
    one_per_group_R = np.isin(np.arange(rollouts.num_rows), first_G)
    family_R = column(rollouts, "family")
    return TrainingCurve(
        step=steps.astype(np.int64),
        correct=mean(correct_R),
        reward=mean(column(rollouts, "reward").astype(float)),
        tokens=mean(completion_lengths(rollouts).astype(float)),
        uniform_groups=mean(uniform_R, one_per_group_R),
        families={str(family): mean(correct_R, family_R == family) for family in sorted(set(family_R))},
    )


def smooth(value_S: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred moving mean over a twentieth of the steps on each side; NaN counts as absent."""
    reach = len(value_S) // 20
    known_S = ~np.isnan(value_S)
    total_S = np.concatenate([[0.0], np.cumsum(np.where(known_S, value_S, 0.0))])
    count_S = np.concatenate([[0], np.cumsum(known_S)])
    low_S = np.maximum(np.arange(len(value_S)) - reach, 0)
    high_S = np.minimum(np.arange(len(value_S)) + reach + 1, len(value_S))
    count = count_S[high_S] - count_S[low_S]
    result = np.full(len(value_S), np.nan)
    return np.divide(total_S[high_S] - total_S[low_S], count, out=result, where=count > 0)


@dataclass(frozen=True)
class SolvedCounts:
    """Problems of one family by pass rate (a named bin) and level, and how many of them were kept."""

    levels: list[int]
    bins: list[str]
    count_B_L: NDArray[np.int64]
    kept_B_L: NDArray[np.int64]


def solved_counts(decisions: pa.Table) -> dict[str, SolvedCounts]:
    """Histograms of the filter's pass rates by family, from a records.DECISION table.

    A bin per possible number of solved samples; with more than ten samples "never", ten equal bins and
    "always".
    """
    samples = int(column(decisions, "samples").max())
    rate_P = np.round(column(decisions, "pass_rate").astype(float), 6)
    if samples <= _MOST_BINS:
        bins = [f"{solved}/{samples}" for solved in range(samples + 1)]
        bin_P = np.round(rate_P * samples).astype(int)
    else:
        between = [f"{100 * b // _MOST_BINS}-{100 * (b + 1) // _MOST_BINS}%" for b in range(_MOST_BINS)]
        bins = ["never", *between, "always"]
        bin_P = np.where(rate_P == 0, 0, 1 + np.floor(rate_P * _MOST_BINS).astype(int))
    family_P, level_P, kept_P = (column(decisions, name) for name in ("family", "level", "kept"))
    found = {}
    for family in sorted(set(family_P)):
        here_P = family_P == family
        levels, level_P_here = np.unique(level_P[here_P], return_inverse=True)
        count_B_L = np.zeros((len(bins), len(levels)), np.int64)
        kept_B_L = np.zeros_like(count_B_L)
        np.add.at(count_B_L, (bin_P[here_P], level_P_here), 1)
        np.add.at(kept_B_L, (bin_P[here_P], level_P_here), kept_P[here_P].astype(int))
        found[str(family)] = SolvedCounts(levels.tolist(), bins, count_B_L, kept_B_L)
    return found
