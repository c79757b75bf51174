"""A ball under one of five cups that are swapped in pairs; the work is where the ball is after each swap."""

from __future__ import annotations

from random import Random

from pipelines.environments.family import Family, Problem

_CUPS = "ABCDE"
_PARTS = ("The ball is under cup ", ". Swap the cups", ". Which cup hides the ball?")


def pose(level: int, rng: Random) -> Problem:
    """`level` swaps of two different cups each."""
    cup = start = rng.choice(_CUPS)
    swaps = [rng.sample(_CUPS, 2) for _ in range(level)]
    path = []
    for one, other in swaps:
        cup = other if cup == one else one if cup == other else cup
        path.append(cup)
    pairs = "".join(f" {one}{other}" for one, other in swaps)
    return Problem(
        family=FAMILY.name,
        level=level,
        prompt=f"{_PARTS[0]}{start}{_PARTS[1]}{pairs}{_PARTS[2]}",
        answer=cup,
        work="".join(f" {cup}." for cup in path),
        verifier="exact",
    )


FAMILY = Family("cups", levels=(5, 6, 7, 8), lexicon=(*_PARTS, *(f" {cup}" for cup in _CUPS)), pose=pose)
