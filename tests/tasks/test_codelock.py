from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.errors import UserError
from tasks import codelock, packages
from tasks.graph import load_graph

REPOSITORY = Path(__file__).resolve().parents[2]

FILES = {
    "dvc.yaml": "stages:\n  rl:\n    cmd: python -m tasks.rl\n    outs: [data/rl]\n"
    "  sft:\n    cmd: python -m tasks.sft\n    outs: [data/sft]\n",
    "params.yaml": "",
    "tasks/__init__.py": "",
    "tasks/contract.py": "import mlflow\nfrom pipelines import unrelated\n",
    "tasks/rl.py": "from tasks.contract import main\n\ndef compute(stage):\n    from pipelines.rl.train import train\n",
    "tasks/sft.py": "from pipelines.sft import train\n",
    "pipelines/__init__.py": '"""All of it."""\n',
    "pipelines/unrelated.py": "import pandas\n",
    "pipelines/registry.py": "from importlib import import_module\n\nload = import_module\n",
    "pipelines/sft.py": "def train():\n    return 1\n",
    "pipelines/rl/__init__.py": "",
    "pipelines/rl/train.py": "import yaml\nfrom . import loss\nfrom pipelines.registry import load, data_file\n"
    'RATIOS = {"token": "pipelines.rl.ratios:token"}\nWORDS = data_file("rl/words.txt")\n',
    "pipelines/rl/words.txt": "one two\n",
    "pipelines/rl/loss.py": '"""Losses."""\nimport numpy\n\ndef loss(x):\n    """The loss."""\n    return x  # it\n',
    "pipelines/rl/ratios.py": "def token():\n    return 2\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def edit(project: Path, name: str, old: str, new: str) -> list[str]:
    """Replace text in a file; what the lock of `rl` says changed."""
    before = codelock.current(project, "rl")
    path = project / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return codelock.explain(before, codelock.current(project, "rl"))


def test_the_closure_is_what_the_stage_imports_and_nothing_else(project: Path) -> None:
    entry = codelock.current(project, "rl")
    assert list(entry["modules"]) == [
        "pipelines/__init__.py",
        "pipelines/registry.py",
        "pipelines/rl/__init__.py",
        "pipelines/rl/loss.py",
        "pipelines/rl/ratios.py",  # named by a string that only the registry resolves
        "pipelines/rl/train.py",
        "tasks/__init__.py",
        "tasks/rl.py",
    ]
    assert list(entry["data"]) == ["pipelines/rl/words.txt"]
    assert {"numpy", "pyyaml"} <= set(entry["packages"])
    assert "mlflow" not in entry["packages"]  # reached through the bookkeeping only
    assert "pandas" not in entry["packages"]


def test_wording_does_not_count_and_meaning_does(project: Path) -> None:
    assert edit(project, "pipelines/rl/loss.py", '"""The loss."""', '"""Another text."""') == []
    assert edit(project, "pipelines/rl/loss.py", "  # it", "") == []
    assert edit(project, "pipelines/rl/loss.py", "    return x", "    return (x)") == []
    assert edit(project, "pipelines/rl/loss.py", "return (x)", "return -x") == ["code pipelines/rl/loss.py changed"]
    assert edit(project, "pipelines/rl/ratios.py", "2", "3") == ["code pipelines/rl/ratios.py changed"]
    assert edit(project, "pipelines/rl/words.txt", "one", "two") == ["code pipelines/rl/words.txt changed"]
    assert edit(project, "pipelines/sft.py", "1", "2") == []
    assert edit(project, "tasks/contract.py", "import mlflow", "import mlflow, json") == []
    assert edit(project, "pipelines/rl/train.py", "import yaml\n", "import yaml\nfrom pipelines import sft\n") == [
        "code pipelines/rl/train.py changed",
        "code pipelines/sft.py is new to this stage",
    ]


def test_packages_and_python_are_explained(project: Path) -> None:
    entry = codelock.current(project, "rl")
    newer = json.loads(json.dumps(entry))
    newer["packages"]["numpy"] = "99.0"
    newer["python"] = "3.12.1"
    assert codelock.explain(entry, newer) == [
        f"Python {entry['python']} -> 3.12.1",
        f"package numpy {entry['packages']['numpy']} -> 99.0",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import importlib", "imports importlib"),
        ("from importlib import import_module", "imports importlib.import_module"),
        ("import importlib.resources", "imports importlib.resources"),
        ("x = __import__('os')", "calls __import__"),
        ("from pipelines.registry import load\nload(f'pipelines.rl.{1}:x')", "at run time"),
        ("from pipelines import registry\nregistry.data_file(name)", "names a data file by a value"),
    ],
)
def test_what_the_closure_cannot_follow_is_refused(project: Path, line: str, message: str) -> None:
    (project / "pipelines/rl/loss.py").write_text(f"x = 1\n{line}\n")
    with pytest.raises(UserError) as error:
        codelock.current(project, "rl")
    assert message in str(error.value)
    assert "pipelines/rl/loss.py, line " in str(error.value)


def test_a_type_checkers_import_does_not_count(project: Path) -> None:
    added = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import pandas\n    from pipelines import unrelated\n"
    )
    path = project / "pipelines/rl/loss.py"
    path.write_text(added + path.read_text())
    entry = codelock.current(project, "rl")
    assert "pandas" not in entry["packages"] and "pipelines/unrelated.py" not in entry["modules"]


def test_refresh_writes_only_what_changed(project: Path) -> None:
    graph = load_graph(project)
    lock = codelock.refresh(project, graph)
    assert set(lock) == {"rl", "sft"} and codelock.read(project) == lock
    stamp = (project / "code.lock").stat().st_mtime_ns
    codelock.refresh(project, graph)
    assert (project / "code.lock").stat().st_mtime_ns == stamp
    (project / "code.lock").write_text("{ damaged")
    assert codelock.refresh(project, graph) == lock == codelock.read(project)


def test_broken_code_and_a_missing_module_are_named(project: Path) -> None:
    (project / "pipelines/rl/loss.py").write_text("def loss(:\n")
    with pytest.raises(UserError, match=r"pipelines/rl/loss.py, line 1: not valid Python"):
        codelock.current(project, "rl")
    (project / "tasks/sft.py").unlink()
    with pytest.raises(UserError, match=r"there is no tasks/sft.py"):
        codelock.current(project, "sft")


def test_loaded_modules_outside_the_closure_are_found(project: Path) -> None:
    loaded = [project / "pipelines/rl/loss.py", project / "tasks/contract.py", project / "pipelines/unrelated.py"]
    assert codelock.loaded_outside(project, "rl", [*loaded, Path(json.__file__)]) == ["pipelines/unrelated.py"]


def test_every_module_of_tasks_is_bookkeeping_or_part_of_a_stage() -> None:
    lock = codelock.build(REPOSITORY, load_graph(REPOSITORY))
    known = {*codelock.BOOKKEEPING, *(file for entry in lock.values() for file in entry["modules"])}
    assert {f"tasks/{path.name}" for path in (REPOSITORY / "tasks").glob("*.py")} <= known
    assert all((REPOSITORY / file).is_file() for file in codelock.BOOKKEEPING)


def test_no_stage_depends_on_the_orchestrators() -> None:
    for entry in codelock.build(REPOSITORY, load_graph(REPOSITORY)).values():
        assert not {"prefect", "dvc", "mlflow"} & set(entry["packages"])
        assert not [file for file in entry["modules"] if file.startswith("flows/")]
        assert "+" not in "".join(entry["packages"].values())


def test_requirements_of_requirements_are_there(tmp_path: Path) -> None:
    found = packages.versions(tmp_path, ["pydantic", "not_installed_anywhere"])
    assert {"pydantic", "pydantic-core", "typing-extensions"} <= set(found)
    assert packages.versions(tmp_path, ["pydantic"]) == found
