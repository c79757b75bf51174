"""The remainder of a long number; the work is the running remainder of long division, digit by digit."""

from __future__ import annotations

from random import Random

from pipelines.environments.family import Family, Problem
from pipelines.environments.words import DIGIT_WORDS

_DIVISORS = (7, 9)
_PARTS = ("What is the remainder of ", " divided by ", "?")


def pose(level: int, rng: Random) -> Problem:
    """A number of `level` digits, to be divided by a number that its last digits say nothing about."""
    digits = [rng.randint(1, 9)] + [rng.randint(0, 9) for _ in range(level - 1)]
    divisor = rng.choice(_DIVISORS)
    remainder = 0
    work = ""
    for digit in digits:
        remainder = (10 * remainder + digit) % divisor
        work += f"{digit}{DIGIT_WORDS[remainder]}"
    number = "".join(map(str, digits))
    return Problem(
        family=FAMILY.name,
        level=level,
        prompt=f"{_PARTS[0]}{number}{_PARTS[1]}{divisor}{_PARTS[2]}",
        answer=str(remainder),
        work=work,
        verifier="numeric",
    )


FAMILY = Family("remainder", levels=(5, 6, 7, 8), lexicon=(*_PARTS, *DIGIT_WORDS), pose=pose)
