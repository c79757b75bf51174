"""Keep the problems whose pass rate under the current policy lies in a band; every decision has its reason.

Problems that are always or never solved give a group baseline nothing to learn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.records import DECISION, content_id, table


def decide(problems: pa.Table, rollouts: Sequence[dict[str, Any]], low: float, high: float) -> pa.Table:
    """A records.DECISION row per problem, in their order.

    rollouts: of any number per problem, of some or all problems. A problem is kept when it was sampled and
    low <= pass rate <= high.
    """
    sampled: dict[str, list[dict[str, Any]]] = {}
    for row in rollouts:
        sampled.setdefault(row["problem_id"], []).append(row)
    rows = []
    for problem in problems.to_pylist():
        group = sampled.get(problem["id"], [])
        rate = float(np.mean([row["correct"] for row in group])) if group else 0.0
        kept, reason = False, "not sampled"
        if group and rate < low:
            reason = f"too hard: pass rate {rate:.3f} is below {low:g}"
        elif group and rate > high:
            reason = f"too easy: pass rate {rate:.3f} is above {high:g}"
        elif group:
            kept, reason = True, f"pass rate {rate:.3f} is inside {low:g} to {high:g}"
        evidence = [row["id"] for row in group]
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
                "samples": len(group),
            }
        )
    return table(rows, DECISION)


def histogram(decisions: pa.Table, samples: int) -> dict[str, dict[str, list[int]]]:
    """family -> level -> how many of the sampled problems had 0, 1, ..., `samples` right answers."""
    counts: dict[str, dict[str, list[int]]] = {}
    for row in decisions.to_pylist():
        if row["samples"]:
            bars = counts.setdefault(row["family"], {}).setdefault(str(row["level"]), [0] * (samples + 1))
            bars[round(row["pass_rate"] * samples)] += 1
    return {family: dict(sorted(levels.items())) for family, levels in sorted(counts.items())}
