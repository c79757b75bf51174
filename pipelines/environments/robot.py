"""A robot on a board with walls, moved step by step; the work is the square it stands on after each move."""

from __future__ import annotations

from random import Random

from pipelines.environments.family import Family, Problem

_SIZE = 5
_MOVES = {" up": (0, 1), " down": (0, -1), " left": (-1, 0), " right": (1, 0)}
_PARTS = ("A robot stands in column ", ", row ", " of a walled board of side five. It goes", ". Where is it now?")


def pose(level: int, rng: Random) -> Problem:
    """`level` moves by one square each; a move against a wall changes nothing, so moves cannot simply be counted."""
    column, row = rng.randint(1, _SIZE), rng.randint(1, _SIZE)
    moves = rng.choices(list(_MOVES), k=level)
    start, go, board, ask = _PARTS
    prompt = f"{start}{column}{go}{row}{board}{''.join(moves)}{ask}"
    work = ""
    for move in moves:
        across, along = _MOVES[move]
        column = min(_SIZE, max(1, column + across))
        row = min(_SIZE, max(1, row + along))
        work += f"{move}{column}{row}"
    return Problem(family=FAMILY.name, level=level, prompt=prompt, answer=f"{column}{row}", work=work, verifier="exact")


FAMILY = Family(
    "robot",
    levels=(5, 6, 7, 8),
    lexicon=(*_PARTS, *_MOVES),
    pose=pose,
)
