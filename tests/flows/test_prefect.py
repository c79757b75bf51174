"""The Prefect flow, on a temporary server of its own. Starting one takes seconds: everything is asked of two runs."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy_project import STAGES, Toy

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture(scope="module")
def project(template: Path, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    root = tmp_path_factory.mktemp("flow") / "project"
    shutil.copytree(template, root, symlinks=True)
    os.environ["PREFECT_HOME"] = str(home)
    yield Toy(root)
    del os.environ["PREFECT_HOME"]


def rows(home: Path, query: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(home / "prefect.db") as database:
        return database.execute(query).fetchall()


TASKS = """select t.name, t.state_name, t.run_count from task_run t join flow_run f on f.id = t.flow_run_id
           where f.created = (select max(created) from flow_run) order by t.start_time"""


def test_a_flow_runs_one_task_per_stage_and_keeps_plan_and_result(project: Toy, home: Path) -> None:
    done = project.ratchet("run", "--prefect", base={"sleep": 4}, synthesize={"sleep": 4})
    tasks = {name: state for name, state, _ in rows(home, TASKS)}
    assert tasks == dict.fromkeys(STAGES, "Done")
    assert project.states() == dict.fromkeys(STAGES, "fresh")
    calls = [float((project.root / f"calls.{name}").read_text()) for name in ("base", "synthesize")]
    assert abs(calls[0] - calls[1]) < 4  # they slept at the same time
    artifacts = dict(rows(home, "select key, data from artifact"))
    assert "| sft | missing | never built |" in artifacts["plan"]
    assert "| rl@2 | done |" in artifacts["result"]
    messages = [message for (message,) in rows(home, "select message from log")]
    assert "sft says hello" in messages
    assert "9 stages ran" in done.stdout


def test_a_mistake_is_not_tried_again_a_failure_is_and_the_fresh_is_skipped(project: Toy, home: Path) -> None:
    document = yaml.safe_load((project.root / "params.yaml").read_text())
    for section in ("filter", "reward"):
        document[section]["value"] = 7
    (project.root / "params.yaml").write_text(yaml.safe_dump(document))
    before = project.total_calls()
    done = project.ratchet("run", "--prefect", check=1, filter={"exit": 2}, reward={"exit": 1})
    after = project.total_calls()
    tasks = {name: (state, count) for name, state, count in rows(home, TASKS)}
    assert tasks["base"][0] == "Skipped" and tasks["sft"][0] == "Skipped"
    assert tasks["filter"] == ("Refused", 1)
    assert tasks["reward"] == ("Failed", 3)
    assert {n: after[n] - before[n] for n in after if after[n] != before[n]} == {"filter": 1, "reward": 3}
    assert "stage filter failed: filter says hello" in done.stderr
    assert "not started because of that: rl@1, rl@2, distill, evaluate" in done.stderr
    refused = re.findall(r"Task run 'filter'.*Traceback", done.stdout + done.stderr, re.DOTALL)
    assert not refused or "StageFailed" in refused[0]
