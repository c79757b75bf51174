"""The lineage log: canonical lines, one chain, nothing half-written, nothing twice."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import UserError
from tasks import lineage
from tests.tasks.project import Project


def entry(invocation: str, stage: str = "sft", **files: str) -> dict[str, Any]:
    """A small statement; `files` maps names to digests."""
    return lineage.statement(
        stage=stage,
        out=f"data/{stage}",
        files=files or {"a.txt": "00"},
        params={"sft": {"lr": 1e-4}},
        seed=0,
        internal={"threads": 1},
        dependencies=[],
        invocation=invocation,
        started="2026-01-01T00:00:00.000Z",
        finished="2026-01-01T00:00:01.000Z",
        byproducts={"rows": {}},
    )


def _lines(root: Path) -> list[bytes]:
    return (root / lineage.LOG).read_bytes().splitlines()


def test_every_line_names_the_one_before_it(tmp_path: Path) -> None:
    heads = [lineage.append(tmp_path, entry(name)) for name in ("i1", "i2", "i3")]
    lines = _lines(tmp_path)
    assert heads == [sha256(line).hexdigest() for line in lines]
    assert [json.loads(line)["previous"] for line in lines] == [None, *heads[:2]]
    assert lineage.breaks(lineage.read(tmp_path)) == []


def test_lines_are_canonical_json(tmp_path: Path) -> None:
    """RFC 8785: sorted keys, no spaces, 1e-4 written as 0.0001."""
    lineage.append(tmp_path, entry("i1"))
    (line,) = _lines(tmp_path)
    assert line.startswith(b'{"previous":null,"statement":{"_type":"https://in-toto.io/Statement/v1","predicate":')
    assert b'"params":{"sft":{"lr":0.0001}}' in line


def test_a_statement_is_in_toto_with_slsa_provenance(finished: Project) -> None:
    (model,) = [s for s in finished.records() if s["subject"][-1]["name"] == "data/model/model.safetensors"]
    assert model["_type"] == "https://in-toto.io/Statement/v1"
    assert model["predicateType"] == "https://slsa.dev/provenance/v1"
    weights = (finished.root / "data/model/model.safetensors").read_bytes()
    assert model["subject"][-1]["digest"] == {"sha256": sha256(weights).hexdigest()}
    assert model["predicate"].keys() == {"buildDefinition", "runDetails"}
    definition = model["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {
        "stage": "model", "output": "data/model", "seed": 7, "params": {"seed": 7, "threads": 1, "model": {"size": 4}},
    }  # fmt: skip
    names = [dependency["name"] for dependency in definition["resolvedDependencies"]]
    assert names == ["data/corpus", "code.lock#model", "git"]


def test_the_record_of_a_directory_above_outputs_names_each_of_them(finished: Project) -> None:
    (report,) = [s for s in finished.records() if s["subject"][0]["name"].startswith("data/report/")]
    inputs = report["predicate"]["buildDefinition"]["resolvedDependencies"][:-2]
    assert [(i["name"], i["annotations"]["stage"]) for i in inputs] == [
        ("data/tuned/1", "tuned@1"),
        ("data/tuned/2", "tuned@2"),
    ]


def test_a_statement_is_appended_once(tmp_path: Path) -> None:
    assert lineage.append(tmp_path, entry("i1")) == lineage.append(tmp_path, entry("i1"))
    assert len(_lines(tmp_path)) == 1


def test_a_torn_line_is_no_record_and_gives_way_to_the_next(tmp_path: Path) -> None:
    lineage.append(tmp_path, entry("i1"))
    with open(tmp_path / lineage.LOG, "ab") as log:
        log.write(b'{"previous":"12')
    assert len(lineage.read(tmp_path)) == 1
    lineage.append(tmp_path, entry("i2"))
    assert [record.metadata["invocationId"] for record in lineage.read(tmp_path)] == ["i1", "i2"]
    assert lineage.breaks(lineage.read(tmp_path)) == []


@pytest.mark.parametrize("harm", ["change", "remove", "swap"])
def test_a_changed_removed_or_moved_record_breaks_the_chain(tmp_path: Path, harm: str) -> None:
    for name in ("i1", "i2", "i3", "i4"):
        lineage.append(tmp_path, entry(name))
    lines = _lines(tmp_path)
    if harm == "change":
        lines[1] = lines[1].replace(b'"seed":0', b'"seed":1')
    elif harm == "remove":
        del lines[1]
    else:
        lines[1], lines[2] = lines[2], lines[1]
    (tmp_path / lineage.LOG).write_bytes(b"\n".join(lines) + b"\n")
    first, *_ = lineage.breaks(lineage.read(tmp_path))
    line = {"change": 3, "remove": 2, "swap": 2}[harm]
    assert first.startswith(f"data/lineage/log.jsonl: line {line} (sft) does not follow from the line before it")


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    lineage.append(tmp_path, entry("i1"))
    with open(tmp_path / lineage.LOG, "ab") as log:
        log.write(b'{"not": "a record"}\n')
    with pytest.raises(UserError, match=r"data/lineage/log\.jsonl: line 2 is not a lineage record"):
        lineage.read(tmp_path)


def _append_many(root: Path, worker: int) -> None:
    for number in range(10):
        lineage.append(root, entry(f"{worker}-{number}"))


def test_processes_that_append_at_the_same_time_make_one_chain(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_append_many, args=(tmp_path, worker)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    records = lineage.read(tmp_path)
    assert len(records) == 40
    assert lineage.breaks(records) == []


# --- the commit -------------------------------------------------------------------------------------------------


def _git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines/a.py").write_text("a = 1\n")
    (tmp_path / "params.yaml").write_text("seed: 0\n")
    (tmp_path / "README.md").write_text("read me\n")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_clean_tree_is_its_commit(repository: Path) -> None:
    head = _git(repository, "rev-parse", "HEAD")
    assert lineage.git_state(repository) == {"commit": head, "dirty": False, "diff_sha256": None, "note": ""}


def test_only_code_and_parameters_make_a_tree_dirty(repository: Path) -> None:
    (repository / "README.md").write_text("other\n")
    (repository / "notes.txt").write_text("new\n")
    assert lineage.git_state(repository)["dirty"] is False


@pytest.mark.parametrize("path", ["pipelines/a.py", "params.yaml", "pipelines/new.py"])
def test_uncommitted_changes_have_a_digest_of_their_own(repository: Path, path: str) -> None:
    (repository / path).write_text("b = 2\n")
    first = lineage.git_state(repository)
    assert first["dirty"] is True
    assert lineage.git_state(repository) == first
    (repository / path).write_text("b = 3\n")
    assert lineage.git_state(repository)["diff_sha256"] != first["diff_sha256"]


def test_staging_a_change_does_not_change_its_digest(repository: Path) -> None:
    (repository / "params.yaml").write_text("seed: 1\n")
    before = lineage.git_state(repository)
    _git(repository, "add", "params.yaml")
    assert lineage.git_state(repository) == before


def test_no_commit_yet_and_no_git_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lineage.git_state(tmp_path)["note"] == "not a git repository"
    (tmp_path / "params.yaml").write_text("seed: 0\n")
    _git(tmp_path, "init", "-q")
    state = lineage.git_state(tmp_path)
    assert (state["commit"], state["dirty"], state["note"]) == (None, True, "no commit yet")
    monkeypatch.setitem(os.environ, "PATH", str(tmp_path))
    assert lineage.git_state(tmp_path)["note"] == "git is not installed"
