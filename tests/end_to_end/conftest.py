"""One run of the small recipe in a fresh copy of the project, shared by the end-to-end tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RATCHET = Path(sys.executable).with_name("ratchet")
STAGES = ["base", "synthesize", "sft", "filter", "reward", "rl@1", "rl@2", "distill", "evaluate"]

# Loaded by every Python process of the run: an attempt to reach another machine is noted and refused.
NO_NETWORK = """
import os, socket, sys

def audit(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        with open(os.environ["RATCHET_TEST_CONNECTIONS"], "a") as log:
            print(sys.argv, arguments[1], file=log)
        raise OSError("the tests allow no network")

sys.addaudithook(audit)
"""


class Project:
    """A copy of the repository with its own git history, and the command line in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=REPOSITORY,
            capture_output=True,
            check=True,
        ).stdout.decode()
        for name in filter(None, listed.split("\0")):
            if (REPOSITORY / name).is_file() and name not in ("dvc.lock", "code.lock"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, root / name)
        shutil.rmtree(root / "data" / "lineage", ignore_errors=True)
        hooks = root.parent / f"{root.name}-hooks"
        hooks.mkdir()
        (hooks / "sitecustomize.py").write_text(NO_NETWORK)
        self.connections = hooks / "connections.log"
        self.environment = os.environ | {
            "PYTHONPATH": f"{root}{os.pathsep}{hooks}",
            "RATCHET_TEST_CONNECTIONS": str(self.connections),
            "MLFLOW_TRACKING_URI": "",
        }
        self.environment.pop("MLFLOW_TRACKING_URI")
        self.git("init", "-q")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "a fresh clone")

    def git(self, *arguments: str) -> None:
        identity = ["-c", "user.name=Test", "-c", "user.email=test@example.invalid"]
        subprocess.run(["git", *identity, *arguments], cwd=self.root, check=True)

    def ratchet(self, *arguments: str, code: int = 0) -> str:
        """Output of `ratchet ARGUMENTS`, both streams; fails unless it exits with `code`."""
        done = subprocess.run(
            [RATCHET, *arguments], cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=570
        )
        output = done.stdout + done.stderr
        assert done.returncode == code, output
        return output

    def plan(self) -> dict[str, tuple[str, list[str]]]:
        stages = json.loads(self.ratchet("plan", "--json"))["stages"]
        return {stage["name"]: (stage["state"], stage["reasons"]) for stage in stages}

    def outcome(self, stage: str) -> dict:
        return json.loads((self.root / ".ratchet" / "outcomes" / f"{stage}.json").read_text())

    def bytes(self) -> dict[str, bytes]:
        """Every output file of every stage."""
        data = self.root / "data"
        return {
            str(path.relative_to(data)): path.read_bytes()
            for path in sorted(data.rglob("*"))
            if path.is_file() and path.relative_to(data).parts[0] in {s.partition("@")[0] for s in STAGES}
        }

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.root / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} holds {old!r} {text.count(old)} times"
        path.write_text(text.replace(old, new))

    def mlflow(self):
        """A client for the project's tracking database and the ids of its experiments."""
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"sqlite:///{self.root}/.ratchet/mlflow.db")
        return client, [experiment.experiment_id for experiment in client.search_experiments()]

    def runs(self) -> list:
        client, experiments = self.mlflow()
        found = client.search_runs(experiments, max_results=1000)
        return [client.get_run(run.info.run_id) for run in found]  # a search leaves the models of a run out


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Project:
    made = Project(tmp_path_factory.mktemp("end-to-end") / "project")
    made.ratchet("recipe", "small")
    made.first_output = made.ratchet("run")
    return made
