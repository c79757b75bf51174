"""What a problem family is: problems of explicit levels made from a seed, with the work a teacher shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

MODES = ("steps", "direct")
"""Behaviour modes of a teacher: write the work before the answer, or answer at once."""


@dataclass(frozen=True)
class Problem:
    """One problem, the right answer, and the work that leads from one to the other."""

    family: str
    level: int
    prompt: str
    answer: str
    work: str
    verifier: str
    verifier_args: dict = field(default_factory=dict)

    @property
    def id(self) -> str:
        from pipelines.records import problem_id  # keeps PyArrow out of the check of params.yaml

        return problem_id(self.prompt, self.answer, self.verifier, self.arguments)

    @property
    def arguments(self) -> str:
        """The verifier's arguments as the JSON text that records carry."""
        return json.dumps(self.verifier_args, sort_keys=True)


@dataclass(frozen=True)
class Family:
    """A named generator of problems.

    pose(level, rng) makes one problem from nothing but its arguments. lexicon: the pieces of text that the
    default tokenizer keeps whole, so that one step of the work reads tokens at a constant distance.
    """

    name: str
    levels: tuple[int, ...]
    lexicon: tuple[str, ...]
    pose: Callable[[int, Random], Problem]

    def generate(self, level: int, seed: int, index: int) -> Problem:
        """Problem number `index` of `level`; a function of (seed, family, level, index) only."""
        if level not in self.levels:
            raise ValueError(f"family {self.name} has levels {list(self.levels)}, not {level}")
        # Random hashes a string seed with SHA-512, so neither the hash seed nor earlier draws matter.
        return self.pose(level, Random(f"{seed}/{self.name}/{level}/{index}"))


def demonstrate(problem: Problem, mode: str) -> str:
    """The completion a rule-based teacher writes for `problem` in `mode`."""
    if mode == "steps":
        return f"<think>{problem.work}</think>{problem.answer}"
    if mode == "direct":
        return f"<think></think>{problem.answer}"
    raise ValueError(f"no teacher has the mode {mode!r}; there are {list(MODES)}")
