"""Making the data: problems with exact counts per family, level and split, and demonstrations by the teachers."""

from __future__ import annotations

import hashlib
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipelines.environments.families import FAMILIES
from pipelines.environments.family import Problem, demonstrate
from pipelines.environments.verifiers import verify
from pipelines.errors import UserError
from pipelines.records import DEMONSTRATION, PROBLEM, content_id, write
from pipelines.synthesis.settings import SynthesizeParams
from pipelines.synthesis.sources import read_source

Rows = list[dict[str, Any]]

_TRIES = 200


def synthesize(
    params: SynthesizeParams,
    seed: int,
    raw: Path,
    output: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, int]:
    """Write problems.parquet and demonstrations.parquet to `output`; returns row counts.

    raw: the directory that `params.sources` are in. Held-out problems have no demonstration.
    Raises UserError for files that cannot be used, for counts that a family cannot provide, and when nothing is held
    out.
    """
    problems, demonstrations, left_out = make_rows(params, seed, raw, progress)
    if not any(row["split"] == "test" for row in problems):
        raise UserError(
            "synthesize: no problem is held out, so no checkpoint could be evaluated; raise test_per_level or "
            "test_share, or give a source with split: test"
        )
    write(output / "problems.parquet", problems, PROBLEM)
    write(output / "demonstrations.parquet", demonstrations, DEMONSTRATION)
    splits = Counter(row["split"] for row in problems)
    modes = Counter(row["mode"] for row in demonstrations)
    counts = {"problems": len(problems), "demonstrations": len(demonstrations), **left_out}
    counts |= {f"problems/{split}": splits[split] for split in ("train", "test")}
    return counts | {f"demonstrations/{mode}": count for mode, count in sorted(modes.items())}


def make_rows(
    params: SynthesizeParams, seed: int, raw: Path, progress: Callable[[int, int], None]
) -> tuple[Rows, Rows, Counter[str]]:
    """Problem rows, demonstration rows, and how many rows of files were left out: `repeated` and `unusable` ones.

    Files that are held out as a whole come first, so that no other file and no family puts their prompts into training.
    """
    problems: Rows = []
    demonstrations: Rows = []
    seen = Seen()
    left_out: Counter[str] = Counter(repeated=0, unusable=0)

    def add(problem: Problem, split: str, source: str, mode: str | None, completion: str | None) -> None:
        problems.append(_problem_row(problem, split, source))
        if split == "train" and mode is not None:
            demonstrations.append(_demonstration_row(problem, mode, completion))

    for source in sorted(params.sources, key=lambda source: source.split != "test"):
        found, unusable = read_source(source, raw)
        left_out["unusable"] += unusable
        for given in found:
            split = source.split if source.split != "hash" else split_of(given.problem.prompt, params.test_share)
            try:
                is_new = seen.is_new(given.problem, split, given.where)
            except UserError:
                if source.unusable == "refuse":
                    raise
                left_out["unusable"] += 1
                continue
            if not is_new:
                left_out["repeated"] += 1
                continue
            mode = "file" if given.demonstration is not None else None
            add(given.problem, split, given.origin, mode, given.demonstration)

    wanted = [(name, level) for name, family in params.families.items() for level in family.levels]
    per_level = params.train_per_level + params.test_per_level
    for done, (name, level) in enumerate(wanted):
        progress(done * per_level, len(wanted) * per_level)
        share = params.families[name].steps_share
        share = params.steps_share if share is None else share
        for problem, split in _quota(name, level, params, seed, seen):
            mode = "steps" if _unit(seed, "mode", problem.id) < share else "direct"
            add(problem, split, f"generator:{name}", mode, demonstrate(problem, mode))
    progress(len(wanted) * per_level, len(wanted) * per_level)
    return problems, demonstrations, left_out


def split_of(prompt: str, test_share: float) -> str:
    """`train` or `test`, by a hash of the prompt alone: no seed, family or file can put one prompt into both."""
    return "test" if _unit("split", _plain(prompt)) < test_share else "train"


class Seen:
    """The problems there are already. No prompt comes up twice, and none in both splits, however it is spaced."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[Problem, str]] = {}  # prompt -> its first problem, and where that is from
        self._split: dict[str, str] = {}  # of a prompt without its spacing

    def is_new(self, problem: Problem, split: str, where: str) -> bool:
        """Whether the prompt may come into `split`; it is then remembered.

        A prompt with the same answer again is a repeat even under another verifier: the first one's judges. Raises
        UserError for an answer that the first one's verifier judges wrong.
        """
        if problem.prompt in self._first:
            self._refuse_contradiction(problem, where)
            return False
        if self._split.setdefault(_plain(problem.prompt), split) != split:
            return False
        self._first[problem.prompt] = (problem, where)
        return True

    def _refuse_contradiction(self, problem: Problem, where: str) -> None:
        first, place = self._first[problem.prompt]
        same = problem.answer == first.answer
        if not same and not verify(problem.answer, first.answer, first.verifier, first.arguments).correct:
            raise UserError(
                f"{where}: this prompt came up before, in {place}, and the answers {reprlib.repr(problem.answer)} and "
                f"{reprlib.repr(first.answer)} contradict each other; mend or remove a row"
            )


def _plain(prompt: str) -> str:
    return " ".join(prompt.split())


def _quota(name: str, level: int, params: SynthesizeParams, seed: int, seen: Seen) -> Iterator[tuple[Problem, str]]:
    """Distinct problems of one family and level, each with its split, until both splits are full."""
    missing = {"train": params.train_per_level, "test": params.test_per_level}
    tries = _TRIES + _TRIES * sum(missing.values())
    for index in range(tries):
        if not any(missing.values()):
            return
        problem = FAMILIES[name].generate(level, seed, index)
        split = split_of(problem.prompt, params.test_share)
        if missing[split] and seen.is_new(problem, split, f"the family {name}"):
            missing[split] -= 1
            yield problem, split
    if any(missing.values()):
        lacking = " and ".join(f"{count} {split}" for split, count in missing.items() if count)
        raise UserError(
            f"synthesize: {name} level {level} has too few different problems, {lacking} problems are lacking "
            f"after {tries} tries; lower train_per_level or test_per_level, or leave the level out"
        )


def _unit(*parts: Any) -> float:
    """A number in [0, 1) that is a hash of `parts`."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _problem_row(problem: Problem, split: str, source: str) -> dict[str, Any]:
    return {
        "id": problem.id,
        "parents": [],
        "family": problem.family,
        "level": problem.level,
        "split": split,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "verifier": problem.verifier,
        "verifier_args": problem.arguments,
        "source": source,
    }


def _demonstration_row(problem: Problem, mode: str, completion: str | None) -> dict[str, Any]:
    return {
        "id": content_id("demonstration", problem.id, mode, completion),
        "parents": [problem.id],
        "problem_id": problem.id,
        "family": problem.family,
        "level": problem.level,
        "mode": mode,
        "prompt": problem.prompt,
        "completion": completion,
    }
