"""Following a chain of telephone calls through a shuffled list; the work names each person reached."""

from __future__ import annotations

from random import Random

from pipelines.environments.family import Family, Problem

_NAMES = ("Ann", "Bob", "Cy", "Dee", "Eli", "Fay", "Gus", "Hal")
_PARTS = ("Start with ", " and follow ", " calls. Who is reached?")


def pose(level: int, rng: Random) -> Problem:
    """Everybody calls somebody, in one ring, so `level` calls never come back to the start."""
    ring = rng.sample(_NAMES, len(_NAMES))
    calls = list(zip(ring, [*ring[1:], ring[0]], strict=True))
    rng.shuffle(calls)
    listed = "".join(f"{caller} calls {called}. " for caller, called in calls)
    return Problem(
        family=FAMILY.name,
        level=level,
        prompt=f"{listed}{_PARTS[0]}{ring[0]}{_PARTS[1]}{level}{_PARTS[2]}",
        answer=ring[level],
        work="".join(f"{hop}{ring[hop]}" for hop in range(1, level + 1)),
        verifier="exact",
    )


_WORDS = tuple(piece for name in _NAMES for piece in (name, f"{name} calls ", f"{name}. "))
FAMILY = Family("relay", levels=(3, 4, 5, 6), lexicon=(*_PARTS, *_WORDS), pose=pose)
