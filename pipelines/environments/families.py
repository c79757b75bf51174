"""The registry of problem families, and the text pieces they want as whole tokens."""

from __future__ import annotations

from pipelines.environments import chain_sum, cups, frog, remainder
from pipelines.environments.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family for family in (chain_sum.FAMILY, remainder.FAMILY, cups.FAMILY, frog.FAMILY)
}


def lexicon() -> tuple[str, ...]:
    """The pieces of all families, each once, in a fixed order."""
    return tuple(dict.fromkeys(piece for family in FAMILIES.values() for piece in family.lexicon))
