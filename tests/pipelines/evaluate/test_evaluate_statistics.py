"""Every statistic against exact combinatorics or a number derived by hand."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import comb, sqrt

import numpy as np
import pytest

from pipelines.evaluate import statistics

T, F = True, False


def rows_with_counts(n: int) -> np.ndarray:
    """One problem for every possible number of correct samples: correct_P_N with P = n + 1."""
    return np.arange(n)[None, :] < np.arange(n + 1)[:, None]


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_pass_at_k_is_the_exact_ratio_of_binomials(n: int) -> None:
    for k in range(1, n + 1):
        value_P = statistics.pass_at_k(rows_with_counts(n), k)
        exact = [float(1 - Fraction(comb(n - c, k), comb(n, k))) for c in range(n + 1)]
        np.testing.assert_allclose(value_P, exact, rtol=0, atol=1e-14)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample() -> None:
    correct_N = [T, F, F, T, F]
    hits = [any(correct_N[i] for i in chosen) for chosen in itertools.combinations(range(5), 3)]
    assert statistics.pass_at_k(np.array([correct_N]), 3)[0] == pytest.approx(sum(hits) / len(hits), abs=1e-15)


def test_pass_at_k_stays_finite_where_binomials_overflow_a_float() -> None:
    correct_P_N = np.zeros((1, 2000), bool)
    correct_P_N[0, 0] = True  # one of 2000, half of them drawn
    assert statistics.pass_at_k(correct_P_N, 1000)[0] == pytest.approx(0.5, abs=1e-12)


def test_pass_at_1_is_accuracy_and_pass_at_n_is_any() -> None:
    correct_P_N = np.random.default_rng(0).random((40, 6)) < 0.3
    np.testing.assert_allclose(statistics.pass_at_k(correct_P_N, 1), statistics.accuracy(correct_P_N), atol=1e-15)
    np.testing.assert_array_equal(statistics.pass_at_k(correct_P_N, 6), correct_P_N.any(axis=1))


@pytest.mark.parametrize("k", [0, -1, 4])
def test_k_outside_the_samples_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="between 1 and the 3 samples"):
        statistics.pass_at_k(np.ones((1, 3), bool), k)
    with pytest.raises(ValueError, match="between 1 and the 3 samples"):
        statistics.best_of_k(np.ones((1, 3), bool), np.zeros((1, 3)), k)


@pytest.mark.parametrize(
    ("answers", "correct", "worth"),
    [
        (["7", "7", "3"], [T, T, F], 1.0),
        (["7", "3", "3"], [T, F, F], 0.0),
        (["7", "7", "3", "3", "5"], [T, T, F, F, F], 0.5),  # two tied answers, one of them right
        (["7", "3", "5"], [T, F, F], 1 / 3),  # every answer tied
        (["", "", "", "7"], [F, F, F, T], 1.0),  # empty answers do not vote
        (["", ""], [F, F], 0.0),
        (["7"], [T], 1.0),
    ],
)
def test_majority_is_the_expected_worth_of_a_uniform_tie_break(answers: list, correct: list, worth: float) -> None:
    for order in itertools.islice(itertools.permutations(range(len(answers))), 24):  # the order of samples is nothing
        answer_P_N = np.array([[answers[i] for i in order]], object)
        correct_P_N = np.array([[correct[i] for i in order]])
        assert statistics.majority(correct_P_N, answer_P_N)[0] == pytest.approx(worth, abs=1e-15)


def test_majority_treats_problems_apart() -> None:
    answer_P_N = np.array([["1", "1", "2"], ["2", "2", "1"]], object)
    correct_P_N = np.array([[T, T, F], [F, F, T]])
    np.testing.assert_array_equal(statistics.majority(correct_P_N, answer_P_N), [1.0, 0.0])


def expected_best(correct_N: list[bool], score_N: list[float], k: int) -> Fraction:
    """Best of k by listing every subset, ties broken uniformly."""
    total = Fraction(0)
    subsets = list(itertools.combinations(range(len(correct_N)), k))
    for subset in subsets:
        top = max(score_N[i] for i in subset)
        winners = [i for i in subset if score_N[i] == top]
        total += Fraction(sum(correct_N[i] for i in winners), len(winners))
    return total / len(subsets)


@pytest.mark.parametrize("seed", range(6))
def test_best_of_k_is_the_mean_over_all_subsets(seed: int) -> None:
    rng = np.random.default_rng(seed)
    correct_P_N = rng.random((5, 7)) < 0.5
    score_P_N = rng.integers(3 if seed % 2 else 1000, size=(5, 7)).astype(float)  # odd seeds have ties
    for k in range(1, 8):
        exact = [float(expected_best(c, s, k)) for c, s in zip(correct_P_N.tolist(), score_P_N.tolist(), strict=True)]
        np.testing.assert_allclose(statistics.best_of_k(correct_P_N, score_P_N, k), exact, atol=1e-12)


def test_best_of_n_picks_by_score() -> None:
    score_P_N = np.array([[0.1, 2.0, -1.0], [0.1, 2.0, -1.0]])
    correct_P_N = np.array([[F, T, F], [T, F, T]])
    np.testing.assert_allclose(statistics.best_of_k(correct_P_N, score_P_N, 3), [1.0, 0.0])


def test_scores_must_be_finite() -> None:
    with pytest.raises(ValueError, match="NaN or infinite"):
        statistics.best_of_k(np.ones((1, 2), bool), np.array([[1.0, np.nan]]), 1)


def test_bootstrap_of_two_problems_has_three_possible_means() -> None:
    mean_R = statistics.resampled_means(np.array([[0.0], [1.0]]), seed=1, resamples=20_000)[:, 0]
    values, counts = np.unique(mean_R, return_counts=True)
    np.testing.assert_array_equal(values, [0.0, 0.5, 1.0])
    np.testing.assert_allclose(counts / 20_000, [0.25, 0.5, 0.25], atol=0.015)  # four standard errors
    assert statistics.estimate(np.array([0.0, 1.0]), seed=1) == (0.5, 0.0, 1.0, 2)


def test_bootstrap_interval_has_the_width_of_the_normal_one() -> None:
    value_P = np.random.default_rng(3).random(400)
    found = statistics.estimate(value_P, seed=0)
    error = value_P.std() / sqrt(400)
    assert found.mean == pytest.approx(value_P.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.04)


def test_interval_covers_the_truth_when_samples_of_a_problem_agree() -> None:
    """Eight copies of a verdict say no more than one: taking samples as independent is 2.8x too sure."""
    rng = np.random.default_rng(11)
    covered = 0
    for _ in range(300):
        correct_P_N = np.repeat(rng.random((100, 1)) < 0.7, 8, axis=1)
        found = statistics.estimate(statistics.accuracy(correct_P_N), seed=0, resamples=500)
        covered += found.low <= 0.7 <= found.high
    assert 0.90 <= covered / 300 <= 0.98


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("problems", [1, 50])
def test_equal_values_give_an_interval_without_width(value: float, problems: int) -> None:
    assert statistics.estimate(np.full(problems, value), seed=0) == (value, value, value, problems)


def test_memory_bound_does_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    value_P_M = np.random.default_rng(0).random((37, 3))
    whole = statistics.resampled_means(value_P_M, seed=5, resamples=501)
    monkeypatch.setattr(statistics, "_CHUNK_ELEMENTS", 200)
    np.testing.assert_allclose(statistics.resampled_means(value_P_M, seed=5, resamples=501), whole, atol=1e-14)


def test_seed_decides_the_interval() -> None:
    value_P = np.random.default_rng(0).random(30)
    assert statistics.estimate(value_P, seed=1) == statistics.estimate(value_P, seed=1)
    assert statistics.estimate(value_P, seed=1) != statistics.estimate(value_P, seed=2)


def test_paired_difference_cancels_what_both_find_hard() -> None:
    rng = np.random.default_rng(0)
    hard_P = rng.random(200) * 0.8
    assert statistics.paired_difference(hard_P, hard_P, seed=0) == (0.0, 0.0, 0.0, 200)
    paired = statistics.paired_difference(hard_P + 0.1, hard_P, seed=0)
    assert paired.mean == pytest.approx(0.1)
    assert paired.high - paired.low < 1e-12  # every problem gained 0.1, so the gain is not uncertain
    shuffled = statistics.paired_difference(hard_P + 0.1, rng.permutation(hard_P), seed=0)
    assert shuffled.high - shuffled.low > 0.05


def test_columns_are_resampled_together() -> None:
    rng = np.random.default_rng(0)
    a_P, b_P = rng.random((2, 50))
    means_R_M = statistics.resampled_means(np.stack([a_P, b_P, a_P - b_P], axis=1), seed=9, resamples=100)
    np.testing.assert_allclose(means_R_M[:, 0] - means_R_M[:, 1], means_R_M[:, 2], atol=1e-14)


def test_comparison_of_different_problems_is_refused() -> None:
    with pytest.raises(ValueError, match="same problems, found 2 and 3"):
        statistics.paired_difference(np.zeros(2), np.zeros(3), seed=0)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4,)])
def test_no_samples_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="problems, samples"):
        statistics.accuracy(np.ones(shape, bool))
