"""A ball under one of five cups that are swapped in pairs; the work is where the ball is after each swap."""

from __future__ import annotations

from itertools import combinations
from random import Random

from pipelines.environments.family import Family, Problem

_CUPS = "ABCDE"
_PAIRS = tuple(combinations(_CUPS, 2))
_PARTS = ("The ball is under cup", ". Swap the cups", ". Which cup hides the ball?")


def pose(level: int, rng: Random) -> Problem:
    """`level` swaps of two cups each."""
    cup = start = rng.choice(_CUPS)
    swaps, work = [], ""
    for one, other in rng.choices(_PAIRS, k=level):
        cup = other if cup == one else one if cup == other else cup
        swaps.append(f" {one}-{other}")
        work += f" {one}-{other} {cup}"
    return Problem(
        family=FAMILY.name,
        level=level,
        prompt=f"{_PARTS[0]} {start}{_PARTS[1]}{''.join(swaps)}{_PARTS[2]}",
        answer=cup,
        work=work,
        verifier="exact",
    )


FAMILY = Family(
    "cups",
    levels=(5, 6, 7, 8),
    lexicon=(*_PARTS, *(f" {cup}" for cup in _CUPS), *(f" {one}-{other}" for one, other in _PAIRS)),
    pose=pose,
)
