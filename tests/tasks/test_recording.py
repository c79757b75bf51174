"""MLflow sees every execution once, and never costs a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks import courier, digests, recording
from tests.tasks.project import NO_SERVER, Project, make_project

LOCAL = ""  # as MLFLOW_TRACKING_URI: the project's own database


def _client(project: Project) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{project.root}/.ratchet/mlflow.db")


def _runs(project: Project, experiment_name: str = "toy") -> dict[str, list[Any]]:
    """Run name -> runs, oldest first, with all their inputs and outputs."""
    client = _client(project)
    experiment = client.get_experiment_by_name(experiment_name)
    found: dict[str, list[Any]] = {}
    for run in reversed(client.search_runs([experiment.experiment_id])):
        found.setdefault(run.info.run_name, []).append(client.get_run(run.info.run_id))
    return found


def _copy(project: Project, to: Path) -> Project:
    """Making a database takes seconds; a copy of one does not."""
    shutil.copytree(project.root, to / "toy")
    return Project(to / "toy", copied=True)


def _spool(project: Project) -> list[Path]:
    return sorted((project.root / ".ratchet/mlflow-spool").iterdir())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose stages ran into its own database; the first two began at the same moment on a fresh clone."""
    project = make_project(tmp_path_factory.mktemp("recorded") / "toy")
    text = (project.root / "dvc.yaml").read_text()
    project.stage("other", '(stage.output / "a.txt").write_text("a")')
    project.write(
        "dvc.yaml",
        text + "  other:\n    cmd: python -m tasks.other\n"
        "    params: [seed, threads, other, {code.lock: [other]}]\n    outs: [data/other]\n",
    )
    with open(project.root / "params.yaml", "a") as file:
        file.write("other: {size: 1}\n")
    project.refresh()
    tags = json.dumps({"prefect.flow_run_id": "flow-1"})
    both = [project.start(name, MLFLOW_TRACKING_URI=LOCAL, RATCHET_TAGS=tags) for name in ("corpus", "other")]
    for process in both:
        _, err = process.communicate(timeout=180)
        assert (process.returncode, err) == (0, "")
    for command in (["model"], ["tuned", "1"]):
        done = project.run(*command, MLFLOW_TRACKING_URI=LOCAL)
        assert (done.returncode, done.stderr) == (0, "")
    return project


def test_every_execution_has_one_finished_run(recorded: Project) -> None:
    runs = _runs(recorded)
    assert {name: [run.info.status for run in found] for name, found in runs.items()} == {
        name: ["FINISHED"] for name in ("corpus", "other", "model", "tuned@1")
    }
    assert _spool(recorded) == []
    for name, (run,) in runs.items():
        assert recorded.outcome(name)["mlflow_run_id"] == run.info.run_id
        assert run.data.tags["ratchet.input_digest"] == recorded.outcome(name)["input_digest"]
    assert runs["corpus"][0].data.tags["prefect.flow_run_id"] == "flow-1"


def test_a_run_holds_parameters_metrics_and_the_digests_of_its_inputs(recorded: Project) -> None:
    (run,) = _runs(recorded)["model"]
    assert run.data.params == {"seed": "7", "threads": "1", "model.size": "4"}
    history = _client(recorded).get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 1), (2, 1 / 2), (3, 1 / 3), (4, 1 / 4)]
    assert run.data.metrics["final/loss"] == 1 / 4
    (used,) = run.inputs.dataset_inputs
    digest = digests.tree_sha256(recorded.root / "data/corpus")
    assert (used.dataset.name, used.dataset.digest) == ("data/corpus", digest[:36])


def test_a_checkpoint_is_a_logged_model_linked_to_its_parents(recorded: Project) -> None:
    runs, client = _runs(recorded), _client(recorded)
    (made,) = runs["model"][0].outputs.model_outputs
    model = client.get_logged_model(made.model_id)
    assert (model.name, str(model.status), model.source_run_id) == (
        "model",
        "READY",
        runs["model"][0].info.run_id,
    )
    assert model.tags["ratchet.output"] == digests.tree_sha256(recorded.root / "data/model")
    assert [entry.model_id for entry in runs["tuned@1"][0].inputs.model_inputs] == [made.model_id]
    assert len(runs["tuned@1"][0].outputs.model_outputs) == 1
    assert runs["corpus"][0].outputs.model_outputs == []
    (record,) = [r for r in recorded.records() if r["subject"][0]["name"].startswith("data/model/")]
    noted = record["predicate"]["runDetails"]["byproducts"][0]["annotations"]
    assert (noted["mlflow_run_id"], noted["mlflow_model_id"]) == (runs["model"][0].info.run_id, made.model_id)


def test_killed_resumed_and_failed_executions(recorded: Project, tmp_path: Path) -> None:
    """A killed execution ends as KILLED, the one that goes on from it names it, a failed one is FAILED."""
    project = _copy(recorded, tmp_path)
    project.stage(
        "other",
        """
        import os, signal, time
        if not stage.is_resumed:
            (stage.scratch / "checkpoint.txt").write_text("1")
            stage.report(1, 2, {"loss": 0.5})
            while not recorded_run(stage.scratch):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        (stage.output / "a.txt").write_text("b")
        """,
    )
    text = (project.root / "tasks/other.py").read_text()
    helper = (
        "def recorded_run(scratch: Path) -> str | None:\n"
        "    import json\n\n"
        '    return json.loads((scratch / "run.json").read_text())["run_id"]\n\n\n'
    )
    (project.root / "tasks/other.py").write_text(text.replace("def compute", helper + "def compute"))
    project.refresh()
    assert project.run("other", MLFLOW_TRACKING_URI=LOCAL).returncode == -signal.SIGKILL
    done = project.run("other", MLFLOW_TRACKING_URI=LOCAL)
    assert (done.returncode, done.stderr) == (0, "")
    _, killed, resumed = _runs(project)["other"]
    assert (killed.info.status, resumed.info.status) == ("KILLED", "FINISHED")
    assert killed.data.metrics["loss"] == 0.5
    assert resumed.data.tags["resumed_from"] == killed.info.run_id == project.outcome("other")["resumed_from"]
    project.stage("other", "1 / 0")
    project.refresh()
    assert project.run("other", MLFLOW_TRACKING_URI=LOCAL).returncode == 1
    assert [run.info.status for run in _runs(project)["other"]] == ["FINISHED", "KILLED", "FINISHED", "FAILED"]


# --- a tracking server that is not there ------------------------------------------------------------------------


@contextmanager
def _silent_server() -> Iterator[str]:
    """Accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"http://me:geheim@127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def _locked_database(path: Path) -> Iterator[str]:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (x)")
    connection.execute("BEGIN EXCLUSIVE")
    yield f"sqlite:///{path}"
    connection.close()


@contextmanager
def _unreadable_database(path: Path) -> Iterator[str]:
    path.write_bytes(b"no database" * 1000)
    yield f"sqlite:///{path}"


@contextmanager
def _refused() -> Iterator[str]:
    yield NO_SERVER


@pytest.mark.parametrize(
    "trouble",
    [
        lambda directory: _refused(),
        lambda directory: _silent_server(),
        lambda directory: _locked_database(directory / "locked.db"),
        lambda directory: _unreadable_database(directory / "broken.db"),
    ],
    ids=["refused", "silent", "locked", "no database"],
)
def test_an_unreachable_server_costs_little_and_fails_nothing(project: Project, tmp_path: Path, trouble) -> None:
    with trouble(tmp_path) as uri:
        started = time.monotonic()
        done = project.run("corpus", MLFLOW_TRACKING_URI=uri)
        spent = time.monotonic() - started
    assert done.returncode == 0
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("corpus: warning: MLflow at ")
    assert "a later stage delivers them" in warning
    assert project.outcome("corpus")["status"] == "succeeded"
    assert spent < 3 + 2  # 2 s for the stage itself on a busy machine
    assert [path.suffix for path in _spool(project)] == [".jsonl", ".state"]
    everything = done.stdout + done.stderr
    everything += "".join(p.read_text(errors="replace") for p in project.root.rglob("*") if p.is_file())
    assert "geheim" not in everything


def test_what_waited_is_delivered_by_a_later_stage_once(recorded: Project, tmp_path: Path) -> None:
    project = _copy(recorded, tmp_path)
    shutil.rmtree(project.root / ".ratchet/scratch")
    for command in (["corpus"], ["model"]):
        assert project.run(*command, RATCHET_EXPERIMENT="waited").returncode == 0
    before = {name: project.outcome(name)["input_digest"] for name in ("corpus", "model")}
    done = project.run("tuned", "1", MLFLOW_TRACKING_URI=LOCAL, RATCHET_EXPERIMENT="waited")
    assert (done.returncode, done.stderr) == (0, "")
    runs = _runs(project, "waited")
    assert {name: [run.info.status for run in found] for name, found in runs.items()} == {
        name: ["FINISHED"] for name in ("corpus", "model", "tuned@1")
    }
    assert {name: runs[name][0].data.tags["ratchet.input_digest"] for name in before} == before
    (parent,) = runs["model"][0].outputs.model_outputs
    assert [entry.model_id for entry in runs["tuned@1"][0].inputs.model_inputs] == [parent.model_id]
    assert _spool(project) == []


# --- the parts --------------------------------------------------------------------------------------------------


class _Fake:
    """Counts what a courier asks of MLflow."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1")

    def search_runs(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def create_run(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_batch(self, run: str, metrics: tuple[Any, ...] = (), params: tuple[Any, ...] = ()) -> None:
        self.batches += [len(metrics)] if metrics else []

    def set_terminated(self, run: str, status: str, end_time: int) -> None:
        self.ended = status


def _journal(tmp_path: Path, events: list[dict[str, Any]]) -> Path:
    start = {
        "event": "start", "time": 0, "experiment": "toy", "run_name": "sft", "params": {}, "datasets": [],
        "parents": [], "tags": {"ratchet.invocation": "i1"}, "run_file": str(tmp_path / "run.json"),
    }  # fmt: skip
    path = tmp_path / "sft-i1.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in [start, *events]))
    return path


def _metrics(steps: int, each: int) -> list[dict[str, Any]]:
    values = {f"m{number}": 0.5 for number in range(each)}
    return [{"event": "metrics", "time": 0, "step": step, "values": values} for step in range(steps)]


def test_metrics_leave_in_batches_of_at_most_a_thousand(tmp_path: Path) -> None:
    fake = _Fake()
    journal = _journal(tmp_path, [*_metrics(steps=300, each=8), {"event": "end", "time": 1, "status": "FINISHED"}])
    courier._Delivery(fake, journal, "u", "local", abandoned=False).carry()
    assert fake.batches == [1000, 1000, 400]
    assert fake.ended == "FINISHED"
    assert not journal.exists()


def test_a_journal_without_an_end_is_a_killed_run(tmp_path: Path) -> None:
    fake = _Fake()
    journal = _journal(tmp_path, _metrics(steps=2, each=1))
    with open(journal, "a") as file:
        file.write('{"event": "metrics", "ti')  # torn by the kill
    courier._Delivery(fake, journal, "u", "", abandoned=True).carry(final=True)
    assert (fake.batches, fake.ended) == ([2], "KILLED")


def test_a_delivery_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    fake = _Fake()
    journal = _journal(tmp_path, _metrics(steps=5, each=1))
    courier._Delivery(fake, journal, "u", "local", abandoned=False).carry()
    with open(journal, "a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in _metrics(steps=3, each=1)))
    courier._Delivery(fake, journal, "u", "", abandoned=True).carry(final=True)
    assert fake.batches == [5, 3]


def test_a_journal_begun_at_another_server_is_left_to_it(tmp_path: Path) -> None:
    journal = _journal(tmp_path, _metrics(steps=1, each=1))
    courier._Delivery(_Fake(), journal, "http://one", "connected", abandoned=False).carry()
    with pytest.raises(courier._Elsewhere):
        courier._Delivery(_Fake(), journal, "http://two", "", abandoned=True)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("postgresql://me:geheim@host/db", "postgresql://***@host/db"),
        ("at http://token@host:5000/x, twice http://a:b@c", "at http://***@host:5000/x, twice http://***@c"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("http://host/path", "http://host/path"),
    ],
)
def test_credentials_are_scrubbed(text: str, clean: str) -> None:
    assert recording.scrub(text) == clean


def test_parameters_are_flattened_to_dotted_names() -> None:
    nested = {"rl": {"loss": {"kl": 0.0}, "levels": [1, 2], "name": "a", "flag": True, "nothing": None, "empty": {}}}
    assert recording.flatten(nested) == {
        "rl.loss.kl": "0.0", "rl.levels": "[1, 2]", "rl.name": "a", "rl.flag": "true", "rl.nothing": "null",
        "rl.empty": "{}",
    }  # fmt: skip


def test_the_stage_process_never_imports_mlflow(project: Project) -> None:
    project.stage("corpus", 'import sys; (stage.output / "a.txt").write_text(str("mlflow" in sys.modules))')
    project.refresh()
    assert project.run("corpus").returncode == 0
    assert (project.root / "data/corpus/a.txt").read_text() == "False"
    assert os.environ.get("MLFLOW_TRACKING_URI") is None
