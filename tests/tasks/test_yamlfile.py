from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import UserError
from tasks.yamlfile import parse_yaml, read_yaml, write_atomically

SCALARS = """
tiny: 1e-4
float: 1.5
dotless: 1_000
leading_zero: 010
word: yes
truth: True
time: 1:30
endless: .inf
half: -.5
text: "1"
nothing: ~
empty:
hexadecimal: 0x1F
signed: +3
octal: 0o17
trailing: 1.
negative: -1e-3
date: 2020-01-01
"3": quoted
4: integer
"""


def test_scalars_are_those_of_yaml_1_2() -> None:
    values = parse_yaml(SCALARS, "params.yaml")
    assert values["tiny"] == 0.0001 and isinstance(values["tiny"], float)
    assert values["word"] == "yes" and values["truth"] is True
    assert values["time"] == "1:30" and values["leading_zero"] == 10 and values["octal"] == 15
    assert values["endless"] == math.inf and values["nothing"] is None and values["empty"] is None
    assert {"3", 4} <= set(values)


def test_dvc_reads_the_same_values() -> None:
    from dvc.utils.serialize import parse_yaml as dvc_parse_yaml

    theirs = dvc_parse_yaml(SCALARS.replace("date: 2020-01-01\n", ""), "params.yaml")
    ours = parse_yaml(SCALARS.replace("date: 2020-01-01\n", ""), "params.yaml")
    assert ours == theirs
    assert [type(v) for v in ours.values()] == [type(v) for v in theirs.values()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "params.yaml, line 3: the key `a` is given twice"),
        ("rl:\n  lr: 1\n  lr: 2\n", "params.yaml, line 3: the key `lr` is given twice"),
        ("a: [1\n", "params.yaml, line 2, column 1: not valid YAML"),
        ("a: b: c\n", "params.yaml, line 1, column 5: not valid YAML"),
        ("- 1\n", "params.yaml: holds a list; it must hold a mapping"),
        ("? [1]\n: 2\n", "a mapping key must be a plain value"),
        ("a: !!python/name:os.system\n", "not valid YAML"),
        ("a: \x01\n", "not valid YAML"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_place(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse_yaml(text, "params.yaml")
    assert message in str(error.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"params.yaml is missing"):
        read_yaml(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_text("# nothing yet\n")
    assert read_yaml(tmp_path / "params.yaml") == {}
    (tmp_path / "params.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(UserError, match="not UTF-8"):
        read_yaml(tmp_path / "params.yaml")


def test_merge_keys_may_be_overridden() -> None:
    assert parse_yaml("a: &x {b: 1, c: 2}\nd:\n  <<: *x\n  b: 3\n", "f")["d"] == {"b": 3, "c": 2}


def test_an_atomic_write_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "deep" / "file.json"
    write_atomically(target, "one")

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(target, "two")
    assert target.read_text() == "one"
    assert [p.name for p in target.parent.iterdir()] == ["file.json"]
