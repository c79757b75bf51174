"""The pass-rate band."""

from __future__ import annotations

from pipelines.filtering.passrate import decide, histogram
from pipelines.records import PROBLEM, table


def problems(count: int):
    base = {
        "parents": [],
        "family": "f",
        "split": "train",
        "prompt": "p",
        "answer": "a",
        "verifier": "exact",
        "verifier_args": "{}",
    }
    return table([base | {"id": f"p{i}", "level": 1 + i % 2, "source": "test"} for i in range(count)], PROBLEM)


def rollouts(outcomes):
    return [
        {"id": f"{p}-{g}", "problem_id": f"p{p}", "correct": bool(value)}
        for p, row in enumerate(outcomes)
        for g, value in enumerate(row)
    ]


OUTCOMES = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_the_band_is_inclusive_and_every_decision_says_why():
    decisions = decide(problems(4), rollouts(OUTCOMES), 0.25, 0.75).to_pylist()
    assert [row["kept"] for row in decisions] == [False, True, True, False]
    assert decisions[0]["reason"] == "too hard: pass rate 0.000 is below 0.25"
    assert decisions[3]["reason"] == "too easy: pass rate 1.000 is above 0.75"
    assert decisions[1]["parents"] == ["p1", "1-0", "1-1", "1-2", "1-3"]
    assert [round(row["pass_rate"] * 4) for row in decisions] == [0, 1, 3, 4]


def test_a_problem_nobody_tried_is_dropped_for_that_reason_and_not_counted():
    decisions = decide(problems(5), rollouts(OUTCOMES), 0.0, 1.0)
    assert decisions.to_pylist()[4]["reason"] == "not sampled" and not decisions.to_pylist()[4]["kept"]
    assert sum(sum(bars) for bars in histogram(decisions, 4)["f"].values()) == 4


def test_histogram_counts_problems_by_right_answers():
    decisions = decide(problems(4), rollouts(OUTCOMES), 0.0, 1.0)
    assert histogram(decisions, 4) == {"f": {"1": [1, 0, 0, 1, 0], "2": [0, 1, 0, 0, 1]}}
