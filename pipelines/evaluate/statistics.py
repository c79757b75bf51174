"""Statistics of sampled answers, each a mean over problems of one value per problem.

P problems · N samples of a problem · K size of a subset of them · M measures side by side · R bootstrap
resamples

A function below turns its arrays into `value_P`; the statistic is `value_P.mean()` and its uncertainty is
that of a mean over problems. The samples of one problem are not independent, so the bootstrap resamples whole
problems.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 10_000
_CHUNK_ELEMENTS = 1 << 20

Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    """A mean over `n` problems with the bounds of its 95% interval."""

    mean: float
    low: float
    high: float
    n: int


def accuracy(correct_P_N: NDArray[np.bool_]) -> Floats:
    """Share of a problem's samples that are correct: value_P."""
    return _samples(correct_P_N).mean(axis=1)


def pass_at_k(correct_P_N: NDArray[np.bool_], k: int) -> Floats:
    """Probability that at least one of `k` samples is correct, unbiased from N >= k samples: value_P.

    With c of N correct it is 1 - C(N - c, k) / C(N, k) (Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", equation 1), written as 1 - product over j < k of (N - c - j) / (N - j), which cannot
    overflow.
    """
    correct_P_N = _samples(correct_P_N)
    n = _subset_size(correct_P_N, k)
    wrong_P = n - correct_P_N.sum(axis=1)
    draw_K = np.arange(k)
    factor_P_K = np.maximum(wrong_P[:, None] - draw_K, 0) / (n - draw_K)
    return 1.0 - factor_P_K.prod(axis=1)


def majority(correct_P_N: NDArray[np.bool_], answer_P_N: NDArray[np.object_]) -> Floats:
    """Accuracy of the most frequent answer among the N samples (maj@N): value_P.

    Answers are the same when their text is. An empty answer casts no vote; a problem with no vote at all
    counts 0. A tie is worth what a uniform choice among the tied answers is worth in expectation, so the
    order of samples does not matter. Should samples with one answer have been judged differently, the answer
    is worth their mean.
    """
    correct_P_N = _samples(correct_P_N)
    if answer_P_N.shape != correct_P_N.shape:
        raise ValueError(f"answers have shape {answer_P_N.shape}, verdicts {correct_P_N.shape}")
    codes = {"": -1}
    code_P_N = np.array([codes.setdefault(answer, len(codes)) for answer in answer_P_N.flat]).reshape(answer_P_N.shape)
    votes_P_N = np.stack([(code_P_N == code_P_N[:, [i]]).sum(axis=1) for i in range(code_P_N.shape[1])], axis=1)
    votes_P_N[code_P_N < 0] = 0
    # Tied answers hold equally many samples, so a uniform choice among answers is one among their samples.
    wins_P_N = (votes_P_N == votes_P_N.max(axis=1, keepdims=True)) & (votes_P_N > 0)
    return (correct_P_N * wins_P_N).sum(axis=1) / np.maximum(wins_P_N.sum(axis=1), 1)


def best_of_k(correct_P_N: NDArray[np.bool_], score_P_N: Floats, k: int) -> Floats:
    """Accuracy of the highest-scored of `k` samples, averaged over every subset of k of the N: value_P.

    The sample of rank r (0 is the highest score) is the best of C(N - 1 - r, k - 1) of the C(N, k) subsets.
    Equal scores are worth the mean over the tied samples, the expectation of a uniform choice. k = N is plain
    best-of-N.
    """
    correct_P_N = _samples(correct_P_N)
    n = _subset_size(correct_P_N, k)
    if score_P_N.shape != correct_P_N.shape:
        raise ValueError(f"scores have shape {score_P_N.shape}, verdicts {correct_P_N.shape}")
    if not np.isfinite(score_P_N).all():
        raise ValueError("a score is NaN or infinite")
    weight_N = np.zeros(n)
    weight_N[0] = k / n
    for r in range(n - 1):
        weight_N[r + 1] = weight_N[r] * max(n - k - r, 0) / (n - 1 - r)
    value_P_N = np.empty(correct_P_N.shape)
    for i in range(n):
        tied_P_N = score_P_N == score_P_N[:, [i]]
        value_P_N[:, i] = (correct_P_N * tied_P_N).sum(axis=1) / tied_P_N.sum(axis=1)
    order_P_N = np.argsort(-score_P_N, axis=1, kind="stable")
    return np.take_along_axis(value_P_N, order_P_N, axis=1) @ weight_N


def mean_length(tokens_P_N: NDArray[np.integer]) -> Floats:
    """Mean number of tokens that the policy wrote per sample: value_P."""
    return tokens_P_N.mean(axis=1)


def resampled_means(value_P_M: Floats, seed: int, resamples: int = RESAMPLES) -> Floats:
    """Means of M measures over `resamples` draws of P problems with replacement: mean_R_M.

    The draws depend on (seed, P) alone, so columns are resampled together and any two calls with the same
    problems are paired. Memory does not grow with R x P.
    """
    if value_P_M.ndim != 2 or 0 in value_P_M.shape:
        raise ValueError(f"expected values of at least one problem and one measure, found shape {value_P_M.shape}")
    problems = value_P_M.shape[0]
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK_ELEMENTS // problems)
    parts = []
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        drawn_R_P = rng.integers(problems, size=(size, problems))
        cell_R_P = drawn_R_P + problems * np.arange(size)[:, None]
        count_R_P = np.bincount(cell_R_P.ravel(), minlength=size * problems).reshape(size, problems)
        parts.append(count_R_P @ value_P_M / problems)
    return np.concatenate(parts)


def estimates(value_P_M: Floats, seed: int, resamples: int = RESAMPLES) -> list[Estimate]:
    """The mean of each of M measures with its 95% percentile bootstrap interval (problems resampled)."""
    mean_R_M = resampled_means(value_P_M, seed, resamples)
    low_M, high_M = np.quantile(mean_R_M, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    columns = zip(value_P_M.mean(axis=0), low_M, high_M, strict=True)
    return [Estimate(float(mean), float(low), float(high), len(value_P_M)) for mean, low, high in columns]


def estimate(value_P: Floats, seed: int, resamples: int = RESAMPLES) -> Estimate:
    """`estimates` of a single measure."""
    return estimates(value_P[:, None], seed, resamples)[0]


def paired_difference(a_P: Floats, b_P: Floats, seed: int, resamples: int = RESAMPLES) -> Estimate:
    """Mean of a - b on the same problems: what both find hard cancels, unlike in two separate intervals."""
    if a_P.shape != b_P.shape:
        raise ValueError(f"a paired comparison needs the same problems, found {len(a_P)} and {len(b_P)}")
    return estimate(a_P - b_P, seed, resamples)


def _samples(correct_P_N: NDArray[np.bool_]) -> NDArray[np.bool_]:
    if correct_P_N.ndim != 2 or 0 in correct_P_N.shape:
        raise ValueError(f"expected verdicts of shape (problems, samples), found {correct_P_N.shape}")
    return correct_P_N


def _subset_size(correct_P_N: NDArray[np.bool_], k: int) -> int:
    n = correct_P_N.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k must be between 1 and the {n} samples of a problem, found {k}")
    return n
