"""Projects to run things in, made once and copied per test."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_project import DVC_YAML, PARAMS, REPOSITORY, WORK, Toy


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    (root / "work.py").write_text(WORK)
    (root / "dvc.yaml").write_text(DVC_YAML)
    (root / "params.yaml").write_text(PARAMS)
    (root / ".dvcignore").write_text((REPOSITORY / ".dvcignore").read_text())
    (root / ".gitignore").write_text(".ratchet/\ncalls.*\n")
    (root / "data" / "raw").mkdir(parents=True)
    (root / "data" / "raw" / "problems.txt").write_text("1 + 1\n")
    shutil.copy(REPOSITORY / "data" / ".gitignore", root / "data" / ".gitignore")
    git = ["git", "-c", "user.name=Toy", "-c", "user.email=toy@example.org"]
    subprocess.run([*git, "init", "-q"], cwd=root, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], cwd=root, check=True)
    shutil.copy(REPOSITORY / ".dvc" / "config", root / ".dvc" / "config")
    subprocess.run([*git, "add", "-A"], cwd=root, check=True)
    subprocess.run([*git, "commit", "-qm", "a toy project"], cwd=root, check=True)
    return root


@pytest.fixture(scope="session")
def built_template(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("built") / "project"
    shutil.copytree(template, root, symlinks=True)
    Toy(root).ratchet("run", "--plain")
    return root


def _copy(source: Path, target: Path) -> Toy:
    shutil.copytree(source, target, symlinks=True)
    return Toy(target)


@pytest.fixture
def toy(template: Path, tmp_path: Path) -> Iterator[Toy]:
    """A project in which nothing was built yet."""
    yield _copy(template, tmp_path / "project")


@pytest.fixture
def built(built_template: Path, tmp_path: Path) -> Iterator[Toy]:
    """A project in which everything is fresh."""
    yield _copy(built_template, tmp_path / "project")


@pytest.fixture
def ended() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes to kill, by id, when a test fails half-way."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
