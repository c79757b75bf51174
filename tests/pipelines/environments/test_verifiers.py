from __future__ import annotations

import pytest

from pipelines.environments.verifiers import check_verifier, final_answer, named, verify, verify_batch
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
    assert named("reasoning_gym:chain_sum") and named("math") and not named("reasoning_gym:") and not named("x")


def test_a_known_answer_that_is_no_number_is_the_users_mistake():
    with pytest.raises(UserError, match="not 'seven'"):
        verify("7", "seven", "numeric")


def test_reasoning_gym_gives_partial_scores_without_calling_them_right():
    verdict = verify("8", "7", "reasoning_gym:chain_sum")
    assert not verdict.correct and 0 <= verdict.score < 1


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
