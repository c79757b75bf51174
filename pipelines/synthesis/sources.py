"""Problems from files, the user's own and the hub's. Every complaint names the file, the line and what to do."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.environments.family import Problem, demonstrate
from pipelines.environments.verifiers import check_answer, check_arguments, check_verifier, verify
from pipelines.errors import UserError
from pipelines.files import sha256
from pipelines.hub import fetch_data
from pipelines.records import PROBLEM
from pipelines.synthesis.settings import Source


@dataclass(frozen=True)
class Given:
    """One problem of a file, with the demonstration that came with it, if any, and where it is from, for a person."""

    problem: Problem
    demonstration: str | None
    origin: str
    where: str


_HIGHEST_LEVEL = 2 ** (PROBLEM.field("level").type.bit_width - 1) - 1
_LEVEL = re.compile(r"([+-]?\d{1,20})(?:\.0+)?", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_DIGITS = 40  # of a number with a fraction or an exponent


def locate(source: Source, raw: Path) -> Path:
    """The file of `source` under `raw`, or a download of it. Raises UserError when it is not there or not as pinned."""
    if source.hub is None:
        path = raw / source.path
        if not path.is_file():
            raise UserError(f"synthesize.sources: there is no file {_shown(source)}")
        return path
    hub = source.hub
    path = fetch_data(hub.dataset, hub.revision, hub.file, "synthesize.sources")
    found = sha256(path)
    if hub.sha256 not in (None, found):
        raise UserError(
            f"synthesize.sources: {_shown(source)} has the digest {found}, params.yaml pins {hub.sha256}. "
            "The file is not the one that was pinned"
        )
    return path


def read_source(source: Source, raw: Path) -> tuple[list[Given], int]:
    """The problems of one file, in its order, and how many rows were left out because they cannot be used.

    Raises UserError for the first such row where they are not to be left out, and for a file without usable rows.
    """
    check_verifier(source.verifier)
    path = locate(source, raw)
    rows = _jsonl(path, source) if path.suffix == ".jsonl" else _parquet(path, source)
    given, refusals = [], []
    for number, cells in rows:
        try:
            given.append(_given(_Row(cells(), f"{_shown(source)}, row {number}"), number, source))
        except UserError as error:
            if source.unusable == "refuse":
                raise
            refusals.append(error)
    if not given and refusals:
        raise UserError(f"{_shown(source)}: none of its {len(refusals)} rows can be used; the first: {refusals[0]}")
    if not given:
        raise UserError(f"synthesize.sources: {_shown(source)} has no rows")
    return given, len(refusals)


def _shown(source: Source) -> str:
    return source.name if source.hub else f"data/raw/{source.path}"


_Rows = Iterator[tuple[int, Callable[[], dict[str, Any]]]]
"""The number of a row, and what reads it: UserError for one that cannot be read."""


def _jsonl(path: Path, source: Source) -> _Rows:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, partial(_object, line, f"{_shown(source)}, line {number}")


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: this is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object, found {line[:40]!r}")
    return row


def _parquet(path: Path, source: Source) -> _Rows:
    wanted = list(dict.fromkeys(name for name in source.columns.model_dump().values() if name is not None))
    try:
        names = pq.read_schema(path).names
        table = pq.read_table(path, columns=[name for name in wanted if name in names])
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{_shown(source)}: this is not a readable Parquet file ({reason})") from error
    for name in wanted:
        if name not in names:
            raise UserError(f"{_shown(source)}: there is no column {name!r}; the columns are {', '.join(names)}")
    for number, cells in enumerate(zip(*table.columns, strict=True), start=1):
        yield number, partial(_values, table.column_names, cells, f"{_shown(source)}, row {number}")


def _values(names: Sequence[str], cells: Sequence[pa.Scalar], where: str) -> dict[str, Any]:
    try:
        return {name: cell.as_py() for name, cell in zip(names, cells, strict=True)}
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, dates that Python has not
        raise UserError(f"{where}: a value cannot be read ({error})") from error


@dataclass(frozen=True)
class _Row:
    """One row of a file. Its methods raise UserError for a value that cannot be used."""

    cells: dict[str, Any]
    where: str

    def text(self, role: str, column: str) -> str:
        """A text, or a number as decimal text without an exponent."""
        value = self._cell(role, column)
        if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
            raise self._refused(role, column, f"is {reprlib.repr(value)}; give a text or a number")
        if isinstance(value, float | Decimal):
            if not math.isfinite(value):
                raise self._refused(role, column, f"is {value}; give a text or a number")
            value = f"{Decimal(str(value)):f}"
            if sum(map(str.isdigit, value)) > _MOST_DIGITS:
                raise self._refused(role, column, f"is a number of more than {_MOST_DIGITS} digits; give it as a text")
        value = str(value)
        if not value.strip():
            raise self._refused(role, column, "is empty")
        if _SURROGATE.search(value):
            raise self._refused(role, column, r"has half of a surrogate pair, such as \ud83d alone; mend the text")
        return value

    def level(self, column: str) -> int:
        """An integer that the records can hold; 2.0 is one, as columns with gaps turn into fractions elsewhere."""
        text = self.text("level", column)
        match = _LEVEL.fullmatch(text.strip())
        if not match or abs(int(match[1])) > _HIGHEST_LEVEL:
            limits = f"from -{_HIGHEST_LEVEL} to {_HIGHEST_LEVEL}"
            raise self._refused("level", column, f"is {reprlib.repr(text)}, which is not an integer {limits}")
        return int(match[1])

    def metadata(self, column: str, verifier: str) -> dict[str, Any]:
        """A JSON object, as text or as a column of mappings."""
        value = self._cell("metadata", column)
        try:
            value = json.loads(value) if isinstance(value, str) else value
            check_arguments(verifier, {"metadata": value})
        except (ValueError, RecursionError) as error:
            raise self._refused("metadata", column, f"cannot be used ({error}); give a JSON object") from error
        return value

    def _cell(self, role: str, column: str) -> Any:
        if column not in self.cells:
            there = ", ".join(sorted(self.cells)) or "none"
            raise UserError(f"{self.where}: there is no column {column!r} for the {role}; the columns are {there}")
        return self.cells[column]

    def _refused(self, role: str, column: str, sentence: str) -> UserError:
        return UserError(f"{self.where}: the {role} (column {column!r}) {sentence}")


def _given(row: _Row, number: int, source: Source) -> Given:
    columns, arguments = source.columns, source.verifier_args
    if columns.metadata is not None:
        arguments = arguments | {"metadata": row.metadata(columns.metadata, source.verifier)}
    problem = Problem(
        family=row.text("family", columns.family) if columns.family else source.family or Path(source.name).stem,
        level=row.level(columns.level) if columns.level else 1,
        prompt=row.text("prompt", columns.prompt),
        answer=_answer(row, source),
        work=_work(row, source),
        verifier=source.verifier,
        verifier_args=arguments,
    )
    try:
        check_answer(problem.answer, problem.verifier, problem.arguments)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from error
    return Given(problem, _demonstration(row, problem, source), f"{_kind(source)}:{source.name}#{number}", row.where)


def _kind(source: Source) -> str:
    return "hub" if source.hub else "file"


def _answer(row: _Row, source: Source) -> str:
    text, mark = row.text("answer", source.columns.answer), source.answer_mark
    if mark is None:
        return text
    if mark not in text or not text.rpartition(mark)[2].strip():
        raise UserError(
            f"{row.where}: the answer (column {source.columns.answer!r}) {reprlib.repr(text)} has nothing after the "
            f"mark {mark!r}; mend it, or answer_mark"
        )
    return text.rpartition(mark)[2].strip()


def _work(row: _Row, source: Source) -> str:
    """What the work's column holds, without what is to be removed; of the answer's column what is before the mark."""
    column = source.columns.work
    if column is None:
        return ""
    text = row.text("work", column)
    if source.answer_mark is not None and column == source.columns.answer:
        text = text.rpartition(source.answer_mark)[0]
    text = re.sub(source.remove, "", text).strip() if source.remove else text.strip()
    if not text or "<think>" in text or "</think>" in text:
        found = "is empty" if not text else "holds <think> or </think>, which are put around it"
        raise UserError(f"{row.where}: the work (column {column!r}) {found}; mend it, remove or answer_mark")
    return text


def _demonstration(row: _Row, problem: Problem, source: Source) -> str | None:
    """The completion to learn from, if there is one. Raises UserError when the verifier does not judge it right."""
    columns = source.columns
    if columns.work is not None:
        column, text = columns.work, demonstrate(problem, "steps")
    elif columns.demonstration is not None:
        column, text = columns.demonstration, row.text("demonstration", columns.demonstration)
    else:
        return None
    verdict = verify(text, problem.answer, problem.verifier, problem.arguments)
    if not verdict.correct:
        raise UserError(
            f"{row.where}: the demonstration (column {column!r}) is judged {verdict.reason!r} "
            f"against the answer {reprlib.repr(problem.answer)}; mend or remove it"
        )
    return text
