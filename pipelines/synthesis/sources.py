"""Problems from the user's own files. Every complaint names the file, the line and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.environments.family import Problem
from pipelines.environments.verifiers import check_verifier, verify
from pipelines.errors import UserError
from pipelines.synthesis.settings import Source


@dataclass(frozen=True)
class Given:
    """One problem of a file, with the demonstration that came with it, if any."""

    problem: Problem
    demonstration: str | None
    origin: str


def read_source(source: Source, raw: Path) -> list[Given]:
    """The problems of one file under `raw`, in its order. Raises UserError for the first row that cannot be used."""
    check_verifier(source.verifier)
    path = raw / source.path
    if not path.is_file():
        raise UserError(f"synthesize.sources: there is no file {_shown(source)}")
    rows = _jsonl(path, source) if path.suffix == ".jsonl" else _parquet(path, source)
    given = [_given(row, number, source) for number, row in rows]
    if not given:
        raise UserError(f"synthesize.sources: {_shown(source)} has no rows")
    return given


def _shown(source: Source) -> str:
    return f"data/raw/{source.path}"


def _jsonl(path: Path, source: Source) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{_shown(source)}, line {number}: this is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise UserError(f"{_shown(source)}, line {number}: expected an object, found {line[:40]!r}")
            yield number, row


def _parquet(path: Path, source: Source) -> Iterator[tuple[int, dict[str, Any]]]:
    wanted = [name for name in source.columns.model_dump().values() if name is not None]
    try:
        names = pq.read_schema(path).names
        rows = pq.read_table(path, columns=[name for name in wanted if name in names]).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{_shown(source)}: this is not a readable Parquet file ({error})") from error
    yield from enumerate(rows, start=1)


def _given(row: dict[str, Any], number: int, source: Source) -> Given:
    columns, where = source.columns, f"{_shown(source)}, row {number}"

    def text(role: str, column: str) -> str:
        if column not in row:
            there = ", ".join(sorted(map(str, row))) or "none"
            raise UserError(f"{where}: there is no column {column!r} for the {role}; the columns are {there}")
        value = row[column]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UserError(f"{where}: the {role} (column {column!r}) is {value!r}; give a text or a number")
        if not str(value).strip():
            raise UserError(f"{where}: the {role} (column {column!r}) is empty")
        return str(value)

    level = 1
    if columns.level is not None:
        try:
            level = int(text("level", columns.level))
        except ValueError as error:
            raise UserError(f"{where}: the level (column {columns.level!r}) is not an integer") from error
    problem = Problem(
        family=text("family", columns.family) if columns.family else Path(source.path).stem,
        level=level,
        prompt=text("prompt", columns.prompt),
        answer=text("answer", columns.answer),
        work="",
        verifier=source.verifier,
        verifier_args=source.verifier_args,
    )
    demonstration = text("demonstration", columns.demonstration) if columns.demonstration else None
    if demonstration is not None:
        verdict = verify(demonstration, problem.answer, problem.verifier, problem.verifier_args)
        if not verdict.correct:
            raise UserError(
                f"{where}: the demonstration (column {columns.demonstration!r}) is judged {verdict.reason!r} "
                f"against the answer {problem.answer!r}; mend or remove it"
            )
    else:
        verify(problem.answer, problem.answer, problem.verifier, problem.verifier_args)
    return Given(problem, demonstration, f"file:{source.path}#{number}")
