"""Preference pairs: right against wrong of one problem, held out by problem."""

from __future__ import annotations

import pytest

from pipelines.errors import UserError
from pipelines.reward.pairs import make_pairs


def rollouts(outcomes: list[str]):
    """One problem per string, one sample per letter: r(ight) or w(rong)."""
    return [
        {"id": f"{p}-{g}", "problem_id": f"problem {p}", "family": "f", "level": 1, "correct": letter == "r"}
        for p, letters in enumerate(outcomes)
        for g, letter in enumerate(letters)
    ]


def test_pairs_join_a_right_with_a_wrong_answer_of_the_same_problem_and_use_each_once():
    pairs = make_pairs(rollouts(["rwrw", "rrrr", "wwww", "rwww"] * 20), 4, 2, 0.5, 0).to_pylist()
    assert len(pairs) == 20 * (2 + 0 + 0 + 1)
    for pair in pairs:
        assert pair["parents"] == [pair["chosen_id"], pair["rejected_id"]]
        assert pair["chosen_id"].split("-")[0] == pair["rejected_id"].split("-")[0]
    used = [rollout for pair in pairs for rollout in pair["parents"]]
    assert len(used) == len(set(used))


def test_no_problem_is_on_both_sides():
    pairs = make_pairs(rollouts(["rwrw"] * 200), 4, 2, 0.25, 0).to_pylist()
    sides: dict[str, set[str]] = {}
    for pair in pairs:
        sides.setdefault(pair["problem_id"], set()).add(pair["split"])
    assert all(len(split) == 1 for split in sides.values())
    heldout = sum(split == {"heldout"} for split in sides.values())
    assert 25 <= heldout <= 75  # 50 expected, standard deviation 6


def test_without_a_contrast_there_is_nothing_to_train_on():
    with pytest.raises(UserError, match="both a right and a wrong answer"):
        make_pairs(rollouts(["rr", "ww"]), 2, 1, 0.5, 0)
