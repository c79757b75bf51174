"""Projects to test stages in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tasks.project import Project, make_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A project in which nothing has run."""
    return make_project(tmp_path / "toy")


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_project(tmp_path_factory.mktemp("finished") / "toy")
    made.run_all()
    return made.root


@pytest.fixture
def finished(_finished: Path, tmp_path: Path) -> Project:
    """A project in which every stage has run, without a tracking server."""
    shutil.copytree(_finished, tmp_path / "finished")
    return Project(tmp_path / "finished", copied=True)
