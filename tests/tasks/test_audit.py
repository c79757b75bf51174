"""`audit` says from hashes alone what a checkpoint was made of, and notices what was changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import UserError
from tasks import digests, lineage
from tasks.audit import audit, render
from tasks.yamlfile import read_yaml
from tests.tasks.project import REPOSITORY, Project


def _stages(report: dict[str, Any]) -> list[str]:
    return [execution["stage"] for execution in report["executions"].values()]


def _by_stage(report: dict[str, Any], stage: str) -> dict[str, Any]:
    (found,) = [execution for execution in report["executions"].values() if execution["stage"] == stage]
    return found


def test_a_stage_is_followed_back_to_the_raw_data(finished: Project) -> None:
    report = audit(finished.root, "report")
    assert (report["stage"], report["state"], report["differences"]) == ("report", "intact", [])
    assert _stages(report) == ["report", "tuned@1", "tuned@2", "model", "corpus"]
    assert report["log"]["records"] == 5
    assert report["log"]["breaks"] == []
    corpus = _by_stage(report, "corpus")
    (raw,) = corpus["inputs"]
    words = digests.file_digests(finished.root / "data/raw/words.txt")["sha256"]
    assert (raw["path"], raw["stage"], raw["record"], raw["files"]) == ("data/raw", None, None, {"words.txt": words})
    assert corpus["rows"] == {"words": 3}
    model = _by_stage(report, "model")
    assert (model["seed"], model["params"]["model"], model["results"]) == (7, {"size": 4}, {"loss": 0.25})
    assert model["git"]["note"] == "not a git repository"
    assert {execution["state"] for execution in report["executions"].values()} == {"intact"}


def test_every_input_leads_to_the_record_of_its_bytes(finished: Project) -> None:
    executions = audit(finished.root, "tuned@2")["executions"]
    for execution in executions.values():
        for entry in execution["inputs"]:
            if entry["stage"]:
                assert executions[entry["record"]]["sha256"] == entry["sha256"]


def test_a_copy_anywhere_is_recognised_by_its_bytes(finished: Project, tmp_path: Path) -> None:
    shutil.copytree(finished.root / "data/tuned/2", tmp_path / "elsewhere/final")
    report = audit(finished.root, str(tmp_path / "elsewhere/final"))
    assert (report["stage"], report["state"]) == ("tuned@2", "intact")
    assert report["record"] == audit(finished.root, "tuned@2")["record"]


@pytest.mark.parametrize("moved", [False, True])
def test_a_modified_checkpoint_is_said_to_be_modified(finished: Project, tmp_path: Path, moved: bool) -> None:
    directory = finished.root / "data/model"
    if moved:
        shutil.copytree(directory, tmp_path / "copy")
        directory = tmp_path / "copy"
    (directory / "model.safetensors").write_bytes(b"other weights")
    report = audit(finished.root, str(directory))
    assert (report["stage"], report["state"]) == ("model", "modified")
    assert report["differences"] == [{"file": "model.safetensors", "problem": "modified"}]
    assert "MODIFIED since: model.safetensors (modified)" in render(report).splitlines()[0]


def test_added_and_missing_files_are_differences(finished: Project) -> None:
    (finished.root / "data/model/config.json").rename(finished.root / "data/model/other.json")
    assert audit(finished.root, "model")["differences"] == [
        {"file": "config.json", "problem": "missing"},
        {"file": "other.json", "problem": "added"},
    ]


def test_one_changed_byte_in_a_parent_or_in_raw_data_is_noticed(finished: Project) -> None:
    (finished.root / "data/raw/words.txt").write_text("one\ntwo\nthreE\n")
    (finished.root / "data/corpus/words.txt").write_text("one\ntwo\nthreE")
    report = audit(finished.root, "model")
    assert report["state"] == "intact"
    corpus = _by_stage(report, "corpus")
    assert (corpus["state"], corpus["differences"]) == ("modified", [{"file": "words.txt", "problem": "modified"}])
    assert (corpus["inputs"][0]["state"], corpus["inputs"][0]["differences"]) == (
        "modified",
        [{"file": "words.txt", "problem": "modified"}],
    )
    assert "raw data, 1 file, MODIFIED since: words.txt (modified)" in render(report)


def test_unknown_bytes_are_said_to_be_on_no_record(finished: Project, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/config.json").write_text("{}")
    (tmp_path / "foreign/model.safetensors").write_bytes(b"1")
    with pytest.raises(UserError) as caught:
        audit(finished.root, str(tmp_path / "foreign"))
    assert f"no lineage record names the bytes in {tmp_path / 'foreign'}" in str(caught.value)
    assert "nearest by file names: tuned@2 (2 of 2 file names, 0 with equal content)" in str(caught.value)


def test_an_execution_is_chosen_by_the_bytes_not_by_its_date(finished: Project, tmp_path: Path) -> None:
    """The corpus is made anew with other words; what was trained before still leads to the old one."""
    shutil.copytree(finished.root / "data/corpus", tmp_path / "old")
    finished.write("data/raw/words.txt", "seven\neight\n")
    assert finished.run("corpus").returncode == 0
    old, new = [record.sha256 for record in lineage.read(finished.root) if record.stage == "corpus"]
    assert audit(finished.root, "corpus")["record"] == new
    assert audit(finished.root, str(tmp_path / "old"))["record"] == old
    model = audit(finished.root, "model")
    assert _by_stage(model, "model")["inputs"][0]["record"] == old
    assert _by_stage(model, "corpus")["state"] == "replaced"


def test_a_lost_output_is_missing_and_still_on_record(finished: Project) -> None:
    shutil.rmtree(finished.root / "data/report")
    report = audit(finished.root, "report")
    assert (report["state"], report["differences"]) == ("missing", [])
    assert "on record, but no longer on disk" in render(report)


def test_a_tampered_log_is_said_first(finished: Project) -> None:
    log = finished.root / lineage.LOG
    lines = log.read_text().splitlines(keepends=True)
    lines[0] = lines[0].replace('"seed":7', '"seed":8')
    log.write_text("".join(lines))
    report = audit(finished.root, "model")
    assert len(report["log"]["breaks"]) == 1
    assert "BROKEN" in render(report)


def test_no_record_and_unknown_names_say_what_to_do(finished: Project, project: Project) -> None:
    with pytest.raises(UserError, match="neither a directory nor a stage on record"):
        audit(finished.root, "nope")
    with pytest.raises(UserError, match="tuned stands for tuned@1, tuned@2; name one of them"):
        audit(finished.root, "tuned")
    with pytest.raises(UserError, match="there is no lineage record yet"):
        audit(project.root, "model")
    assert project.run("corpus").returncode == 0
    with pytest.raises(UserError, match="no lineage record names stage model; `ratchet run model` writes one"):
        audit(project.root, "model")


def test_the_text_shows_each_stage_once(finished: Project) -> None:
    lines = render(audit(finished.root, "report")).splitlines()
    assert lines[0] == "data/report: the output of stage report; its bytes are those on record"
    assert lines[2].startswith("report  data/report  sha256 ")
    assert sum("tuned@1  data/tuned/1" in line for line in lines) == 2
    (second,) = [line for line in lines if "tuned@1  data/tuned/1" in line and line.endswith("(above)")]
    assert second.startswith("   └─ ")
    assert any(line.endswith("raw data, 1 file") for line in lines)


def test_the_report_is_json_and_needs_neither_torch_nor_mlflow(finished: Project) -> None:
    code = (
        "import json, sys; from tasks.audit import audit; print(json.dumps(audit('.', 'report')));"
        "assert not {'torch', 'mlflow', 'pyarrow', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=finished.root, env=finished.environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["stage"] == "report"


def test_sources_from_outside_the_project_are_on_record(project: Project, tmp_path: Path) -> None:
    (tmp_path / "foreign.txt").write_text("from elsewhere")
    project.stage(
        "corpus",
        f"""
        stage.log_source("foreign.txt", {str(tmp_path / "foreign.txt")!r})
        stage.log_source("hub/model", digest={{"gitCommit": "ab" * 20}})
        (stage.output / "a.txt").write_text("a")
        """,
    )
    project.refresh()
    assert project.run("corpus").returncode == 0
    sources = _by_stage(audit(project.root, "corpus"), "corpus")["sources"]
    expected = digests.file_digests(tmp_path / "foreign.txt")["sha256"]
    assert sources == [
        {"name": "foreign.txt", "digest": {"sha256": expected}},
        {"name": "hub/model", "digest": {"gitCommit": "ab" * 20}},
    ]


def test_of_executions_with_equal_bytes_the_one_that_dvc_lock_names_is_meant(finished: Project) -> None:
    params = (finished.root / "params.yaml").read_text()
    first = audit(finished.root, "tuned@1")["record"]
    (finished.root / "params.yaml").write_text(params.replace("tuned: {size: 1}", "tuned: {size: 2}"))
    assert finished.run("tuned", "1").returncode == 0
    second = audit(finished.root, "tuned@1")["record"]
    assert second != first
    code = read_yaml(finished.root / "code.lock")["tuned"]
    for size, record in ((1, first), (2, second)):
        used = {"seed": 7, "threads": 1, "tuned": {"size": size}, "rounds.1": {"init": "data/model"}}
        entry = {"params": {"params.yaml": used, "code.lock": {"tuned": code}}}
        (finished.root / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": {"tuned@1": entry}}))
        report = audit(finished.root, "tuned@1")
        assert (report["record"], report["state"]) == (record, "intact")
        assert report["executions"][record]["params"]["tuned"] == {"size": size}


def test_what_is_no_output_of_a_project_is_refused_in_words(finished: Project, tmp_path: Path) -> None:
    for target in (str(finished.root), "/"):
        with pytest.raises(UserError, match="is the project itself or holds it"):
            audit(finished.root, target)
    with pytest.raises(UserError, match="is not a Ratchet project"):
        audit(finished.root / "data", "model")
