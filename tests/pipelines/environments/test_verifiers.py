from __future__ import annotations

import pytest

from pipelines.environments.verifiers import (
    check_answer,
    check_arguments,
    check_verifier,
    final_answer,
    named,
    verify,
    verify_batch,
)
from pipelines.errors import UserError


@pytest.mark.parametrize(
    ("text", "answer", "verifier", "reason"),
    [
        # where the answer is
        ("7", "7", "exact", "correct"),
        ("<think>1 2</think>7", "7", "exact", "correct"),
        ("<think></think>\n 7\t", "7", "exact", "correct"),
        ("<think>7</think>8", "7", "exact", "wrong"),
        ("<think>a</think>8<think>b</think>7", "7", "exact", "correct"),
        ("<think>7", "7", "exact", "unfinished"),
        ("<think>a</think>8<think>7", "7", "exact", "unfinished"),
        ("7</think>8", "7", "exact", "wrong"),
        ("<think>7</think>", "7", "exact", "no answer"),
        ("<think>7</think> \n", "7", "exact", "no answer"),
        ("", "7", "exact", "no answer"),
        ("x" * 2001, "7", "exact", "too long"),
        # exact
        ("a  b", "a b", "exact", "wrong"),
        ("B", "b", "exact", "wrong"),
        ("B", " B ", "exact", "correct"),
        ("B\x00", "B", "exact", "wrong"),
        # numeric
        ("007", "7", "numeric", "correct"),
        ("+7", "7", "numeric", "correct"),
        ("7.0", "7", "numeric", "correct"),
        ("-0", "0", "numeric", "correct"),
        ("-7", "7", "numeric", "wrong"),
        ("14/2", "7", "numeric", "correct"),
        ("1/0", "7", "numeric", "not a number"),
        ("0.1", "1/10", "numeric", "correct"),
        ("1,000", "1000", "numeric", "correct"),
        ("1,00", "100", "numeric", "several answers"),
        ("7 8", "7", "numeric", "several answers"),
        ("7, 7", "7", "numeric", "several answers"),
        ("the answer is 7", "7", "numeric", "not a number"),
        ("seven", "7", "numeric", "not a number"),
        ("nan", "7", "numeric", "not a number"),
        ("inf", "7", "numeric", "not a number"),
        ("1e999999999", "7", "numeric", "several answers"),
        ("9" * 2000, "7", "numeric", "wrong"),
        ("9" * 100000, "7", "numeric", "too long"),
        ("٧", "7", "numeric", "not a number"),
        ("7\n", "7", "numeric", "correct"),
        # math
        (r"\frac{1}{2}", "0.5", "math", "correct"),
        ("x+1", "1+x", "math", "correct"),
        ("x+2", "1+x", "math", "wrong"),
    ],
)
def test_verdicts(text, answer, verifier, reason):
    verdict = verify(text, answer, verifier)
    assert verdict.reason == reason
    assert verdict.correct == (reason == "correct")
    assert verdict.score == float(verdict.correct)


def test_a_completion_cut_by_the_length_limit_is_never_right():
    assert verify("<think></think>1", "1", "numeric", finished=False).reason == "unfinished"


def test_tolerance_is_inclusive_and_exact():
    assert verify("0.3", "0.2", "numeric", '{"tolerance": 0.1}').correct
    assert not verify("0.3001", "0.2", "numeric", '{"tolerance": 0.1}').correct


def test_an_unknown_verifier_names_the_known_ones():
    with pytest.raises(UserError, match="'exakt'; use one of exact, numeric, math, reasoning_gym:NAME"):
        check_verifier("exakt")
    with pytest.raises(UserError, match="reasoning-gym has no dataset 'chain_sun'"):
        check_verifier("reasoning_gym:chain_sun")
    with pytest.raises(UserError, match="reasoning-gym has no dataset 'composite'"):
        check_verifier("reasoning_gym:composite")
    assert named("reasoning_gym:chain_sum") and named("math") and not named("reasoning_gym:") and not named("x")


def test_a_known_answer_that_is_no_number_is_the_users_mistake():
    with pytest.raises(UserError, match="not 'seven'"):
        verify("7", "seven", "numeric")


def test_reasoning_gym_gives_partial_scores_without_calling_them_right():
    verdict = verify("8", "7", "reasoning_gym:chain_sum")
    assert not verdict.correct and 0 <= verdict.score < 1


@pytest.mark.parametrize(
    ("text", "answer", "dataset"),
    [
        ("x", "2 × 2", "prime_factorization"),  # ValueError
        ("{}", "[[1]]", "game_of_life"),  # KeyError
        ("1e999", "0.5", "coin_flip"),  # OverflowError
        ("exit()", "ab", "string_insertion"),  # SystemExit: the scorer evaluates the text
    ],
)
def test_a_text_that_stops_a_scorer_is_wrong(text, answer, dataset):
    verdict = verify(text, answer, f"reasoning_gym:{dataset}")
    assert (verdict.correct, verdict.score, verdict.reason) == (False, 0.0, "not readable")


def test_metadata_that_a_scorer_misses_is_told_from_a_text_it_cannot_read():
    knight = "reasoning_gym:knight_swap"
    assert verify("No", "No", knight).reason == "no metadata"
    assert verify("No", "No", knight, '{"metadata": {"is_possible": false}}').reason == "correct"


@pytest.mark.parametrize(
    ("answer", "verifier", "message"),
    [
        ("<think>7", "exact", "the known answer '<think>7' is judged 'unfinished' by exact; mend it$"),
        ("4 + 3", "reasoning_gym:countdown", r"judged 'wrong' by .*; mend it or give the metadata it needs"),
        ("No", "reasoning_gym:knight_swap", "judged 'no metadata'"),
        ("3", "reasoning_gym:shortest_path", "judged 'no metadata'"),  # right, but another text would need metadata
    ],
)
def test_a_known_answer_must_be_right_by_its_own_verifier(answer, verifier, message):
    with pytest.raises(UserError, match=message):
        check_answer(answer, verifier, "{}")


@pytest.mark.parametrize(
    ("verifier", "arguments", "message"),
    [
        ("math", {"tolerance": 0}, "the verifier math has no argument 'tolerance'; it takes none"),
        ("numeric", {"tolerance": float("inf")}, "tolerance must be a number >= 0, not inf"),
        ("numeric", {"tolerance": float("nan")}, "tolerance must be a number >= 0, not nan"),
        ("reasoning_gym:chain_sum", {"metadata": {"a": {1}}}, "metadata must be what JSON can hold"),
    ],
)
def test_arguments_that_a_verifier_does_not_take(verifier, arguments, message):
    with pytest.raises(ValueError, match=message):
        check_arguments(verifier, arguments)


def test_columns_are_judged_in_order():
    verdicts = verify_batch(
        ["1", "B", "1"], ["1", "B", "1"], ["numeric", "exact", "exact"], ["{}"] * 3, [True, True, False]
    )
    assert [verdict.reason for verdict in verdicts] == ["correct", "correct", "unfinished"]
    with pytest.raises(ValueError):
        verify_batch(["1"], ["1", "2"], ["exact", "exact"], ["{}", "{}"])


def test_final_answer_is_none_only_while_thinking():
    assert final_answer("abc") == "abc"
    assert final_answer("<think>abc") is None
    assert final_answer("<think>abc</think>") == ""


def test_no_answer_is_run_as_a_program(tmp_path):
    trace = tmp_path / "trace"
    program = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    rows = {
        "countdown": ("3 * (4 + 5)", {"numbers": [3, 4, 5], "target": 27}),
        "puzzle24": ("3 * (4 + 5) - 3", {"numbers": [3, 4, 5, 3]}),
        "binary_matrix": ("0 1\n1 0", {}),
        "spiral_matrix": ("1 2 3", {}),
        "string_insertion": ("ABCD", {}),
    }
    for dataset, (answer, metadata) in rows.items():
        arguments = {"metadata": metadata}
        assert verify(answer, answer, f"reasoning_gym:{dataset}", arguments).correct, dataset
        for text in (program, f"[{program}]", "9**9**9**9"):
            assert not verify(text, answer, f"reasoning_gym:{dataset}", arguments).correct
    assert not trace.exists()
    with pytest.raises(UserError, match="runs an answer as a program"):
        verify("x", "x", "reasoning_gym:simple_integration", {})
