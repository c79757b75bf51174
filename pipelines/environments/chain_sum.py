"""Sums and differences of one-digit numbers, from reasoning-gym's `chain_sum`; the work is the running total."""

from __future__ import annotations

from random import Random

from pipelines.environments.family import Family, Problem

_PREFIX = "State the final answer to the following arithmetic problem: "


def pose(level: int, rng: Random) -> Problem:
    """A chain of `level` terms whose running total stays between 0 and 99, so that it always has two digits."""
    from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

    while True:
        config = ChainSumConfig(
            min_terms=level, max_terms=level, min_digits=1, max_digits=1, seed=rng.getrandbits(32), size=1
        )
        entry = ChainSumDataset(config)[0]
        totals = running_totals(entry["metadata"]["expression"])
        if min(totals) >= 0:
            break
    return Problem(
        family=FAMILY.name,
        level=level,
        prompt=entry["question"],
        answer=entry["answer"],
        work="".join(f"{total:02d}" for total in totals[1:]),
        verifier="numeric",
    )


def running_totals(expression: str) -> list[int]:
    """The total after each term of an expression such as `4 + 3 - 2`."""
    first, *rest = expression.split()
    totals = [int(first)]
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        totals.append(totals[-1] + (int(term) if sign == "+" else -int(term)))
    return totals


FAMILY = Family("chain_sum", levels=(5, 6, 7, 8), lexicon=(_PREFIX, " + ", " - ", " ="), pose=pose)
