"""Keep the problems whose pass rate under the current policy lies in a band; every decision has its reason.

Problems that are always or never solved give a group baseline nothing to learn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.records import DECISION, content_id, table


def decide(problems: pa.Table, rollouts: Sequence[dict[str, Any]], samples: int, low: float, high: float) -> pa.Table:
    """A records.DECISION row per problem, in their order.

    rollouts: `samples` per problem, problem-major. A problem is kept when low <= pass rate <= high.
    """
    correct_P_G = np.array([row["correct"] for row in rollouts], dtype=bool).reshape(-1, samples)
    rows = []
    for index, problem in enumerate(problems.to_pylist()):
        rate = float(correct_P_G[index].mean())
        kept, reason = True, f"pass rate {rate:.3f} is inside {low:g} to {high:g}"
        if rate < low:
            kept, reason = False, f"too hard: pass rate {rate:.3f} is below {low:g}"
        elif rate > high:
            kept, reason = False, f"too easy: pass rate {rate:.3f} is above {high:g}"
        evidence = [row["id"] for row in rollouts[index * samples : (index + 1) * samples]]
        rows.append(
            {
                "id": content_id("decision", problem["id"], kept, reason, evidence),
                "parents": [problem["id"], *evidence],
                "problem_id": problem["id"],
                "family": problem["family"],
                "level": problem["level"],
                "kept": kept,
                "reason": reason,
                "pass_rate": rate,
                "samples": samples,
            }
        )
    return table(rows, DECISION)


def histogram(decisions: pa.Table, samples: int) -> dict[str, dict[str, list[int]]]:
    """family -> level -> how many problems had 0, 1, ..., `samples` right answers."""
    counts: dict[str, dict[str, list[int]]] = {}
    for family, level, rate in zip(
        decisions["family"].to_pylist(), decisions["level"].to_pylist(), decisions["pass_rate"].to_pylist(), strict=True
    ):
        bars = counts.setdefault(family, {}).setdefault(str(level), [0] * (samples + 1))
        bars[round(rate * samples)] += 1
    return {family: dict(sorted(levels.items())) for family, levels in sorted(counts.items())}
