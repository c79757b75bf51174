"""metrics.json: its numbers by hand, its shape against the document, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace as Builders

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pipelines.evaluate import summary
from pipelines.evaluate.statistics import estimate, paired_difference
from pipelines.records import ROLLOUT, table

SEED = {"seed": 7, "resamples": 200}


def by_hand(build: Builders) -> dict[str, pa.Table]:
    """Two problems, two samples. sft solves 1 of 4, rl@1 solves 3 of 4."""
    easy, hard = build.problems(per_level=1, families=("sums",)).to_pylist()
    verdicts = {"sft": [(easy, 1, 0), (hard, 0, 0)], "rl@1": [(easy, 1, 1), (hard, 0, 1)]}
    return {
        name: table([build.rollout(p, i, bool(v)) for p, *given in rows for i, v in enumerate(given)], ROLLOUT)
        for name, rows in verdicts.items()
    }


def test_numbers_by_hand(build: Builders) -> None:
    found = summary.summarise(by_hand(build), parameters={"sft": 10, "rl@1": 20}, **SEED)
    sft, rl = found["checkpoints"]["sft"], found["checkpoints"]["rl@1"]
    assert sft["accuracy"] == {"mean": 0.25, "low": 0.0, "high": 0.5, "n": 2}
    assert sft["pass_at_k"] == {"1": 0.25, "2": 0.5}
    assert rl["pass_at_k"] == {"1": 0.75, "2": 1.0}
    assert sft["majority"] == {"k": 2, "mean": 0.25, "low": 0.0, "high": 0.5, "n": 2}  # a tie of one each
    assert sft["best_of_n"] is None  # no reward model scored them
    assert sft["length"] == {
        "mean": 3.5,
        "low": 3.5,
        "high": 3.5,
        "n": 2,
        "median": 3.5,
        "p95": 4.0,
        "max": 4,
    }
    assert sft["finish"] == {"stop": 1.0, "length": 0.0}
    assert (sft["parameters"], rl["parameters"]) == (10, 20)
    assert sft["families"] == {"sums": {"accuracy": sft["accuracy"]}}
    assert sft["levels"]["sums"]["1"] == {"accuracy": {"mean": 0.5, "low": 0.5, "high": 0.5, "n": 1}}
    assert sft["levels"]["sums"]["2"] == {"accuracy": {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 1}}
    (comparison,) = found["comparisons"]
    gain = {"mean": 0.5, "low": 0.5, "high": 0.5, "n": 2}  # both problems gain one of two samples
    assert comparison == {
        "a": "rl@1",
        "b": "sft",
        "difference": gain,
        "families": {"sums": {"difference": gain}},
    }


def test_intervals_are_those_of_the_statistics(checkpoints: dict, parameters: dict) -> None:
    found = summary.summarise(checkpoints, parameters=parameters, **SEED)
    sft, rl = (summary.arrange(checkpoints[name]).correct_P_N.mean(axis=1) for name in ("sft", "rl@1"))
    expected = estimate(sft, **SEED)
    assert found["checkpoints"]["sft"]["accuracy"] == pytest.approx(expected._asdict(), abs=1e-6)
    pair = next(one for one in found["comparisons"] if (one["a"], one["b"]) == ("rl@1", "sft"))
    assert pair["difference"] == pytest.approx(paired_difference(rl, sft, **SEED)._asdict(), abs=1e-6)


def test_every_stage_is_compared_with_its_parent_and_the_ends_with_each_other(
    checkpoints: dict, parameters: dict
) -> None:
    found = summary.summarise(checkpoints, parameters=parameters, **SEED)
    assert [(one["a"], one["b"]) for one in found["comparisons"]] == [
        ("sft", "base"),
        ("rl@1", "sft"),
        ("rl@2", "rl@1"),
        ("student", "rl@2"),
        ("rl@2", "sft"),
    ]


def test_given_parents_decide_the_pairs() -> None:
    names = ["base", "sft", "rl@1", "rl@2", "student"]
    parents = {"sft": "base", "rl@1": "sft", "rl@2": "sft", "student": "rl@1"}
    pairs = summary.compared(names, parents)
    assert ("rl@2", "sft") in pairs and ("rl@2", "rl@1") not in pairs
    assert ("student", "rl@1") in pairs and ("student", "rl@2") in pairs


def test_a_single_checkpoint_has_nothing_to_compare(checkpoints: dict, parameters: dict) -> None:
    found = summary.summarise({"sft": checkpoints["sft"]}, parameters=parameters, **SEED)
    assert list(found["checkpoints"]) == ["sft"]
    assert found["comparisons"] == []


def test_order_of_rows_and_of_row_groups_changes_nothing(checkpoints: dict, parameters: dict) -> None:
    rng = np.random.default_rng(0)
    shuffled = {}
    for name, one in checkpoints.items():
        mixed = one.take(pa.array(rng.permutation(one.num_rows)))
        shuffled[name] = pa.concat_tables([mixed.slice(5), mixed.slice(0, 5)])
    expected = summary.summarise(checkpoints, parameters=parameters, **SEED)
    assert summary.summarise(shuffled, parameters=parameters, **SEED) == expected


def test_seed_and_resamples_change_the_intervals_only(checkpoints: dict, parameters: dict) -> None:
    def interval(seed: int, resamples: int) -> tuple[float, float]:
        found = summary.summarise(checkpoints, parameters=parameters, seed=seed, resamples=resamples)
        one = found["checkpoints"]["rl@1"]["accuracy"]
        assert one["mean"] == expected
        return one["low"], one["high"]

    expected = round(float(summary.arrange(checkpoints["rl@1"]).correct_P_N.mean()), 6)
    assert interval(7, 101) == interval(7, 101)
    assert interval(7, 101) != interval(8, 101)
    assert interval(7, 101) != interval(7, 4000)


@pytest.mark.parametrize(("rate", "value"), [(0.0, 0.0), (1.0, 1.0)])
def test_nothing_or_everything_solved(build: Builders, rate: float, value: float, problems: pa.Table) -> None:
    found = summary.summarise({"base": build.samples(problems, rate)}, parameters={"base": 1}, **SEED)
    base = found["checkpoints"]["base"]
    assert base["accuracy"] == {"mean": value, "low": value, "high": value, "n": 8}
    assert set(base["pass_at_k"].values()) == {value}
    assert base["majority"]["mean"] == base["best_of_n"]["mean"] == value


def test_best_of_n_follows_the_reward_model(build: Builders, problems: pa.Table) -> None:
    rows = []
    for problem in problems.to_pylist():
        for i, correct in enumerate([False, True, False]):
            parts = [("verifier", 0.0), ("reward_model", 5.0 if correct else -float(i))]
            rows.append(build.rollout(problem, i, correct, reward_parts=parts))
    found = summary.summarise({"sft": table(rows, ROLLOUT)}, parameters={"sft": 1}, **SEED)
    assert found["checkpoints"]["sft"]["best_of_n"]["mean"] == 1.0
    assert found["checkpoints"]["sft"]["accuracy"]["mean"] == pytest.approx(1 / 3, abs=1e-6)


def test_length_counts_what_the_policy_wrote_in_every_turn(build: Builders) -> None:
    (problem,) = build.problems(per_level=1, families=("sums",), levels=1).to_pylist()
    mask = [False, True, True, False, False, True]  # two turns with an observation between them
    columns = {"tokens": [1] * 6, "action_mask": mask, "logprobs": [0.0] * 6}
    rows = table([build.rollout(problem, 0, True), build.rollout(problem, 1, True, **columns)], ROLLOUT)
    np.testing.assert_array_equal(summary.completion_lengths(rows), [3, 3])
    np.testing.assert_array_equal(summary.completion_lengths(rows.slice(1)), [3])
    many = pa.concat_tables([rows] * 3000)  # more than are unpacked at a time
    np.testing.assert_array_equal(summary.completion_lengths(many), [3] * 6000)
    empty = {"tokens": [1], "action_mask": [False], "logprobs": [0.0]}
    rows = table([build.rollout(problem, 0, True, **columns), build.rollout(problem, 1, False, **empty)], ROLLOUT)
    np.testing.assert_array_equal(summary.completion_lengths(rows), [3, 0])


def test_cut_completions_are_counted(build: Builders, problems: pa.Table) -> None:
    rows = [
        build.rollout(problem, i, True, finish_reason=reason)
        for problem in problems.to_pylist()
        for i, reason in enumerate(["stop", "length", "length", "length"])
    ]
    found = summary.summarise({"sft": table(rows, ROLLOUT)}, parameters={"sft": 1}, **SEED)
    assert found["checkpoints"]["sft"]["finish"] == {"stop": 0.25, "length": 0.75}


@pytest.mark.parametrize(
    ("text", "finished", "answer"),
    [
        ("<think>1+1</think> 2 ", True, "2"),
        ("<think></think>2", True, "2"),
        ("<think>a</think>b<think>c</think>d", True, "d"),
        ("<think>1+1</think>", True, ""),
        ("<think>1+1", True, ""),
        ("<think>1+1</think>2", False, ""),  # cut: it may have become 20
    ],
)
def test_answer_is_what_the_verifier_judges(text: str, finished: bool, answer: str) -> None:
    assert summary.answer_of(text, finished) == answer


def test_levels_are_in_the_order_of_numbers(build: Builders, parameters: dict) -> None:
    problems = build.problems(per_level=1, families=("sums",), levels=11)
    found = summary.summarise({"sft": build.samples(problems, 0.5)}, parameters=parameters, **SEED)
    assert list(found["checkpoints"]["sft"]["levels"]["sums"]) == [str(level) for level in range(1, 12)]


def test_ks_are_powers_of_two_and_the_number_of_samples() -> None:
    assert [summary.ks(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_checkpoints_on_different_problems_are_refused(checkpoints: dict, parameters: dict) -> None:
    rows = checkpoints["sft"]
    gone = rows["problem_id"][0]
    fewer = rows.filter(pc.not_equal(rows["problem_id"], gone))
    with pytest.raises(ValueError, match="sft was not sampled on the same problems as base"):
        summary.summarise({"base": checkpoints["base"], "sft": fewer}, parameters=parameters, **SEED)


def test_uneven_repeated_and_half_scored_samples_are_refused(build: Builders, problems: pa.Table) -> None:
    rows = build.samples(problems, 0.5)
    with pytest.raises(ValueError, match="no samples"):
        summary.arrange(rows.slice(0, 0))
    with pytest.raises(ValueError, match="between 3 and 4 samples"):
        summary.arrange(rows.slice(1))
    with pytest.raises(ValueError, match="not numbered 0 to 7"):
        summary.arrange(pa.concat_tables([rows, rows]))
    unscored = build.samples(problems, 0.5, scored=False)
    with pytest.raises(ValueError, match="4 of 32 samples have no reward model score"):
        summary.arrange(pa.concat_tables([rows.slice(4), unscored.slice(0, 4)]))


def shape(value: object, key: str = "") -> object:
    """The keys of nested JSON, with the names of checkpoints, families, levels and k left open."""
    if isinstance(value, dict):
        if key in {"checkpoints", "pass_at_k", "families", "levels"}:
            return {"*": shape(next(iter(value.values())), "families" if key == "levels" else "")}
        return {name: shape(child, name) for name, child in value.items()}
    if isinstance(value, list):
        return [shape(value[0])]
    return "number" if isinstance(value, int | float) else type(value).__name__


def test_the_document_shows_the_shape(checkpoints: dict, parameters: dict) -> None:
    document = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    examples = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", document, re.DOTALL)]
    shown = next(one for one in examples if "checkpoints" in one)
    found = json.loads(json.dumps(summary.summarise(checkpoints, parameters=parameters, **SEED)))
    assert shape(shown) == shape(found)
    plan = next(one for one in examples if "stages" in one)
    assert all(set(stage) == {"name", "state", "reasons"} for stage in plan["stages"])
