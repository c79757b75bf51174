"""Sums and differences of one-digit numbers, from reasoning-gym's `chain_sum`; the work is the running total.

`5 - 2 + 6` is worked as ` minus two three plus six nine`: each term as one token, then the total.
"""

from __future__ import annotations

from random import Random

from pipelines.environments.family import Family, Problem
from pipelines.environments.words import DIGIT_WORDS

_PREFIX = "State the final answer to the following arithmetic problem: "
_SIGNS = {"+": " plus", "-": " minus"}
_SIGNED = tuple(sign + word for sign in _SIGNS.values() for word in DIGIT_WORDS)


def pose(level: int, rng: Random) -> Problem:
    """A chain of `level` terms whose running total is one digit all the way, so that the sum cannot be estimated."""
    from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

    config = ChainSumConfig(
        min_terms=level, max_terms=level, min_digits=1, max_digits=1, seed=rng.getrandbits(48), size=1
    )
    dataset = ChainSumDataset(config)
    for entry in map(dataset.__getitem__, range(1_000_000)):
        steps = running_totals(entry["metadata"]["expression"])
        if all(0 <= total <= 9 for _, _, total in steps):
            return Problem(
                family=FAMILY.name,
                level=level,
                prompt=entry["question"],
                answer=entry["answer"],
                work="".join(
                    f"{_SIGNS[sign]}{DIGIT_WORDS[term]}{DIGIT_WORDS[total]}" for sign, term, total in steps[1:]
                ),
                verifier="numeric",
            )
    raise RuntimeError(f"chain_sum: no chain of {level} terms stays within one digit")


def running_totals(expression: str) -> list[tuple[str, int, int]]:
    """(sign, term, total so far) of each term of an expression such as `4 + 3 - 2`."""
    tokens = ["+", *expression.split()]
    steps: list[tuple[str, int, int]] = []
    total = 0
    for sign, term in zip(tokens[::2], map(int, tokens[1::2]), strict=True):
        total += term if sign == "+" else -term
        steps.append((sign, term, total))
    return steps


FAMILY = Family(
    "chain_sum", levels=(4, 5, 6, 7), lexicon=(_PREFIX, " + ", " - ", " =", *DIGIT_WORDS, *_SIGNED), pose=pose
)
