"""A frog on a ring of nine stones that walks, jumps and turns; the work is where it looks and sits after each move."""

from __future__ import annotations

from random import Random

from pipelines.environments.family import Family, Problem

_STONES = 9
_MOVES = {" walk": 1, " jump": 4, " turn": 0}
_FACING = {1: " clockwise", -1: " backwards"}
_PARTS = ("A frog sits on stone ", " of a ring of nine and looks clockwise. Its moves:", ". Where is it now?")


def pose(level: int, rng: Random) -> Problem:
    """`level` moves of one stone, of four stones, or round on the spot.

    A turn reverses all that follows, so the moves cannot be counted; an odd ring gives nothing away by parity.
    """
    stone, facing = rng.randint(1, _STONES), 1
    moves = rng.choices(list(_MOVES), k=level)
    prompt = f"{_PARTS[0]}{stone}{_PARTS[1]}{''.join(moves)}{_PARTS[2]}"
    work = ""
    for move in moves:
        if move == " turn":
            facing = -facing
        stone = (stone - 1 + facing * _MOVES[move]) % _STONES + 1
        work += f"{move}{_FACING[facing]}{stone}"
    return Problem(family=FAMILY.name, level=level, prompt=prompt, answer=str(stone), work=work, verifier="numeric")


FAMILY = Family("frog", levels=(5, 6, 7, 8), lexicon=(*_PARTS, *_MOVES, *_FACING.values()), pose=pose)
