"""Every mistake in params.yaml is named with file, key, what was found and what is allowed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.errors import UserError
from tasks.settings import load_params, values
from tasks.yamlfile import read_yaml

REPOSITORY = Path(__file__).resolve().parents[2]
INVALID = sorted((REPOSITORY / "tests/params/invalid").glob("*.yaml"))


def _merge(base: dict[Any, Any], overlay: dict[Any, Any]) -> dict[Any, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        deeper = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if deeper else value
    return merged


def _remove(document: dict[Any, Any], key: str) -> None:
    *way, last = key.split(".")
    for part in way:
        document = document[part]
    del document[last]


class _Quoting(yaml.SafeDumper):
    """Quotes every text, as PyYAML itself would write the text 1e-4 in a way that YAML 1.2 reads as a number."""


_Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def _apply(patch: Path, to: Path) -> None:
    """`params.yaml` in `to`: the file itself if it says `# whole: file`, else the valid one with the patch on it."""
    text = patch.read_text()
    shutil.copy(REPOSITORY / "dvc.yaml", to)
    if "# whole: file" in text:
        (to / "params.yaml").write_text(text)
        return
    document = read_yaml(REPOSITORY / "params.yaml")
    for key in re.findall(r"^# remove: (.*)$", text, re.MULTILINE):
        _remove(document, key)
    overlay = read_yaml(patch) if re.search(r"^[^#\n]", text, re.MULTILINE) else {}
    (to / "params.yaml").write_text(yaml.dump(_merge(document, overlay), Dumper=_Quoting, sort_keys=False))


def test_the_default_parameters_are_valid() -> None:
    settings = load_params(REPOSITORY)
    assert list(settings.rounds) == [str(number) for number in range(1, len(settings.rounds) + 1)]


@pytest.mark.parametrize("patch", INVALID, ids=[path.stem for path in INVALID])
def test_a_mistake_is_named_on_one_screen(patch: Path, tmp_path: Path) -> None:
    _apply(patch, tmp_path)
    with pytest.raises(UserError) as caught:
        load_params(tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 20
    assert lines[0].startswith("params.yaml")
    expected = re.findall(r"^# expect: (.*)$", patch.read_text(), re.MULTILINE)
    for sentence in expected:
        assert any(sentence in line for line in lines), lines
    if expected:
        assert len(lines) == len(expected), lines
    for ending in re.findall(r"^# expect-last: (.*)$", patch.read_text(), re.MULTILINE):
        assert lines[-1].endswith(ending)


def test_a_stage_sees_only_what_it_declares() -> None:
    settings = load_params(REPOSITORY, only=["seed", "sft", "rounds.1"])
    assert settings.section("sft").steps >= 1
    assert list(settings.rounds) == ["1"]
    for undeclared in (lambda: settings.section("rl"), lambda: settings.threads):
        with pytest.raises(UserError, match=r"dvc\.yaml: the stage reads parameter (rl|threads) without declaring"):
            undeclared()


def test_a_mistake_in_another_section_does_not_stop_a_stage(tmp_path: Path) -> None:
    _apply(REPOSITORY / "tests/params/invalid/unknown_key.yaml", tmp_path)
    assert load_params(tmp_path, only=["seed", "rl"]).seed == 0


def test_values_are_what_the_file_says() -> None:
    found = values(REPOSITORY, ["seed", "rounds.1", "distill.teacher"])
    document = read_yaml(REPOSITORY / "params.yaml")
    assert found == {
        "seed": document["seed"],
        "rounds.1": document["rounds"]["1"],
        "distill.teacher": document["distill"]["teacher"],
    }
    with pytest.raises(UserError, match=r"params\.yaml: sft\.lr: missing"):
        values(REPOSITORY, ["sft.lr"])


def test_a_whole_number_is_a_number() -> None:
    """YAML writes 1 for 1.0: an integer where a number is asked for is no mistake, the reverse is one."""
    from pydantic import Field

    from pipelines.settings import Strict
    from tasks.settings import _validate

    class Model(Strict):
        weight: float = Field(ge=0)
        widths: tuple[int, ...] = ()

    made, problems = _validate(Model, {"weight": 1, "widths": [2, 3]}, "toy")
    assert (made.weight, made.widths, problems) == (1.0, (2, 3), [])
    assert _validate(Model, {"weight": 1, "widths": [2.0]}, "toy")[1] == [
        ("toy.widths[0]", "found 2.0 (float); allowed: an integer")
    ]
