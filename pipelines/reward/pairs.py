"""Preference pairs from a policy's own verified samples: a right and a wrong answer to the same problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from pipelines.errors import UserError
from pipelines.records import PREFERENCE, content_id, table


def make_pairs(
    rollouts: Sequence[dict[str, Any]], samples: int, per_problem: int, heldout_share: float, seed: int
) -> pa.Table:
    """Up to `per_problem` (right, wrong) pairs per problem as rows of records.PREFERENCE.

    rollouts: `samples` per problem, problem-major. Each rollout is used once at the most. A problem is held out as a
    whole, by a hash of (seed, its id), so no problem is on both sides.
    Raises UserError when either split would be empty.
    """
    rows = []
    for start in range(0, len(rollouts), samples):
        group = rollouts[start : start + samples]
        right = [row for row in group if row["correct"]]
        wrong = [row for row in group if not row["correct"]]
        problem = group[0]
        share = int(content_id("heldout", seed, problem["problem_id"]), 16) / 16**16
        for chosen, rejected in list(zip(right, wrong, strict=False))[:per_problem]:
            rows.append(
                {
                    "id": content_id("preference", chosen["id"], rejected["id"]),
                    "parents": [chosen["id"], rejected["id"]],
                    "problem_id": problem["problem_id"],
                    "family": problem["family"],
                    "level": problem["level"],
                    "split": "heldout" if share < heldout_share else "train",
                    "chosen_id": chosen["id"],
                    "rejected_id": rejected["id"],
                }
            )
    for split in ("train", "heldout"):
        if not any(row["split"] == split for row in rows):
            raise UserError(
                f"reward: no problem of the {split} split has both a right and a wrong answer among {samples} samples; "
                "sample more problems (reward.problems) or more answers (reward.samples)"
            )
    return table(rows, PREFERENCE)
