"""The lineage log: one in-toto Statement with SLSA v1 provenance per stage execution, chained by SHA-256.

`data/lineage/log.jsonl` holds one line per record: canonical JSON (RFC 8785) of
`{"previous": SHA-256 of the line before or null, "statement": in-toto Statement v1}`. A statement names every
file of the output (`subject`), every input, the code, the commit and the parameters; a reader needs nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rfc8785

from pipelines.errors import UserError

LOG = Path("data/lineage/log.jsonl")
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:ratchet:stage:v1"
CODE_AND_PARAMS = ("flows", "tasks", "pipelines", "params.yaml", "dvc.yaml")


def canonical(value: Any) -> bytes:
    """The RFC 8785 bytes of a JSON value: one value, one byte string."""
    return rfc8785.dumps(value)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def now() -> str:
    """The present moment, UTC, as RFC 3339."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- the commit ---------------------------------------------------------------------------------------------


def git_state(root: Path) -> dict[str, Any]:
    """`{"commit", "dirty", "diff_sha256", "note"}` of the working tree, looking at code and parameters only.

    Without git, or before the first commit, `commit` is None and `note` says which. `diff_sha256` covers the
    uncommitted changes of tracked files and the content of untracked ones; it is None when there are none.
    """
    if shutil.which("git") is None:
        return {"commit": None, "dirty": None, "diff_sha256": None, "note": "git is not installed"}
    inside = _git(root, "rev-parse", "--is-inside-work-tree")
    if inside is None:
        return {"commit": None, "dirty": None, "diff_sha256": None, "note": "not a git repository"}
    head = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    paths = [path for path in CODE_AND_PARAMS if (root / path).exists()]
    against = "HEAD" if head else "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # git's name of the empty tree
    diff = _git(
        root,
        "diff",
        "--binary",
        "--no-color",
        "--no-ext-diff",
        "--no-textconv",
        against,
        "--",
        *CODE_AND_PARAMS,
    )
    listed = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", *paths) if paths else b""
    if diff is None or listed is None:
        return {
            "commit": None,
            "dirty": None,
            "diff_sha256": None,
            "note": "git could not read the working tree",
        }
    untracked = {
        name: sha256((root / name).read_bytes())
        for name in listed.decode().split("\0")
        if name and (root / name).is_file()
    }
    dirty = bool(diff or untracked)
    return {
        "commit": head.decode().strip() if head else None,
        "dirty": dirty,
        "diff_sha256": sha256(canonical({"diff": sha256(diff), "untracked": untracked})) if dirty else None,
        "note": "" if head else "no commit yet",
    }


def _git(root: Path, *arguments: str) -> bytes | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(["git", *arguments], cwd=root, env=environment, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


# --- statements ---------------------------------------------------------------------------------------------


def statement(
    *,
    stage: str,
    out: str,
    files: Mapping[str, str],
    params: Mapping[str, Any],
    seed: int,
    internal: Mapping[str, Any],
    dependencies: list[dict[str, Any]],
    invocation: str,
    started: str,
    finished: str,
    byproducts: Mapping[str, Any],
) -> dict[str, Any]:
    """The record of one execution; `files`: path inside `out` -> SHA-256, `params`: what dvc.yaml names."""
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": f"{out}/{name}", "digest": {"sha256": digest}} for name, digest in sorted(files.items())],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"stage": stage, "output": out, "params": params, "seed": seed},
                "internalParameters": internal,
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {"id": "urn:ratchet:local"},
                "metadata": {"invocationId": invocation, "startedOn": started, "finishedOn": finished},
                "byproducts": [{"name": "execution", "annotations": byproducts}],
            },
        },
    }


def code_entries(group: str, code: Mapping[str, Any], commit: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The dependencies that are code: the stage's entry of code.lock and the commit (see `git_state`)."""
    return [
        {"name": f"code.lock#{group}", "digest": {"sha256": sha256(canonical(code))}},
        {
            "name": "git",
            "digest": {"gitCommit": commit["commit"]} if commit["commit"] else {},
            "annotations": {name: commit[name] for name in ("dirty", "diff_sha256", "note")},
        },
    ]


@dataclass(frozen=True)
class Record:
    """One line of the log, with short names for what a reader asks of it."""

    sha256: str
    previous: str | None
    statement: dict[str, Any]

    @property
    def definition(self) -> dict[str, Any]:
        return self.statement["predicate"]["buildDefinition"]

    @property
    def stage(self) -> str:
        return self.definition["externalParameters"]["stage"]

    @property
    def output(self) -> str:
        return self.definition["externalParameters"]["output"]

    @property
    def metadata(self) -> dict[str, Any]:
        return self.statement["predicate"]["runDetails"]["metadata"]

    @property
    def byproducts(self) -> dict[str, Any]:
        return self.statement["predicate"]["runDetails"]["byproducts"][0]["annotations"]

    @property
    def files(self) -> dict[str, str]:
        """Path inside the output directory -> SHA-256."""
        start = len(self.output) + 1
        return {subject["name"][start:]: subject["digest"]["sha256"] for subject in self.statement["subject"]}


# --- the log ------------------------------------------------------------------------------------------------


def append(root: Path, entry: dict[str, Any]) -> str:
    """Append a statement and return the SHA-256 of its line; one that is already there is not repeated."""
    path = root / LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    invocation = entry["predicate"]["runDetails"]["metadata"]["invocationId"]
    with open(path, "a+b") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        log.seek(0)
        data = log.read()
        if data and not data.endswith(b"\n"):  # a writer died inside its line: that record was never finished
            data = data[: data.rfind(b"\n") + 1]
            log.truncate(len(data))
        previous = None
        for line in data.splitlines():
            previous = sha256(line)
            found = json.loads(line)["statement"]["predicate"]["runDetails"]["metadata"]["invocationId"]
            if found == invocation:
                return previous
        line = canonical({"previous": previous, "statement": entry})
        log.write(line + b"\n")
        log.flush()
        os.fsync(log.fileno())
    return sha256(line)


def read(root: Path) -> list[Record]:
    """All finished records, oldest first. Raises UserError for a line that is not a record."""
    return list(_records(root))


def _records(root: Path) -> Iterator[Record]:
    path = root / LOG
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            content = json.loads(line)
            record = Record(sha256(line), content["previous"], content["statement"])
            _ = record.stage, record.output, record.files, record.metadata["invocationId"], record.byproducts
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UserError(
                f"{LOG}: line {number} is not a lineage record ({error!r}). The log was edited or damaged; "
                "restore it from git or a copy."
            ) from None
        yield record


def breaks(records: list[Record]) -> list[str]:
    """Where the chain does not hold, in sentences; empty for an intact log."""
    found = []
    previous = None
    for number, record in enumerate(records, start=1):
        if record.previous != previous:
            found.append(
                f"{LOG}: line {number} ({record.stage}) does not follow from the line before it: "
                "a record was changed, removed or moved"
            )
        previous = record.sha256
    return found
