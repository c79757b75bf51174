"""A stage in two processes looks from outside like a stage in one."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest

from tests.tasks.project import REPOSITORY, Project

SUM = """
from pipelines.training.team import Team
team = Team()
ranks = team.total({"rank": float(team.rank), "one": 1.0})
if stage.params.size == 9:
    from pipelines.errors import UserError
    raise UserError("nine is too many")
(stage.scratch / f"seen-{team.rank}").write_text("here")
import time
for step in range(stage.params.size):
    stage.report(step + 1, stage.params.size, {"loss": 1.0})
    time.sleep(0.1)
team.dismiss()
(stage.output / "sum.txt").write_text(f"{ranks['rank']} {ranks['one']}")
"""


@pytest.fixture
def pair(project: Project) -> Project:
    """The project with a stage `corpus` that is to run in two processes."""
    for folder in ("training", "generation", "base", "environments"):
        shutil.copytree(REPOSITORY / "pipelines" / folder, project.root / "pipelines" / folder, dirs_exist_ok=True)
    shutil.copy(REPOSITORY / "pipelines/records.py", project.root / "pipelines/records.py")
    project.stage("corpus", SUM)
    params, graph = project.root / "params.yaml", project.root / "dvc.yaml"
    params.write_text("distributed: {processes: 2}\n" + params.read_text())
    graph.write_text(graph.read_text().replace("[seed, threads, corpus,", "[seed, threads, distributed, corpus,"))
    project.refresh()
    return project


def resize(project: Project, size: int) -> None:
    path = project.root / "params.yaml"
    path.write_text(path.read_text().replace("corpus: {size: 3}", f"corpus: {{size: {size}}}"))


def test_the_first_process_is_the_stage_and_the_others_write_nothing(pair: Project) -> None:
    done = pair.run("corpus")
    assert done.returncode == 0, done.stderr
    assert (pair.root / "data/corpus/sum.txt").read_text() == "1.0 2.0"
    assert done.stdout.count("published data/corpus") == 1
    assert pair.outcome("corpus")["status"] == "succeeded"
    assert len(pair.records()) == 1
    shutil.rmtree(pair.root / "data/corpus")
    assert pair.run("corpus").returncode == 0
    assert pair.outcome("corpus")["status"] == "republished"


def test_a_mistake_is_said_once_and_ends_with_2(pair: Project) -> None:
    resize(pair, 9)
    done = pair.run("corpus")
    assert done.returncode == 2
    assert done.stderr.count("corpus: nine is too many") == 1
    assert pair.outcome("corpus")["kind"] == "user"


def test_a_signal_ends_all_processes(pair: Project) -> None:
    resize(pair, 300)
    process = pair.start("corpus")
    scratch = pair.root / ".ratchet/scratch/corpus"
    deadline = time.monotonic() + 60
    while len(list(scratch.glob("*/seen-*"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM
    assert pair.outcome("corpus")["status"] == "interrupted"
    assert not _running(pair)


def _running(project: Project) -> list[int]:
    mark = str(project.root)
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.readlink(f"/proc/{entry}/cwd") == mark:
                    found.append(int(entry))
            except OSError:
                continue
    return found
