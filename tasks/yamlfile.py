"""Reading YAML the way DVC reads it: YAML 1.2 scalars, and no key twice."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

from pipelines.errors import UserError

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _DuplicateKey(yaml.MarkedYAMLError):
    pass


class _Loader(_Base):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 (PyYAML fills it per class)

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.deep_construct = True  # a node that holds itself is an error then

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            try:
                duplicate = key in seen
            except TypeError as error:
                raise yaml.MarkedYAMLError(
                    problem="a mapping key must be a plain value", problem_mark=key_node.start_mark
                ) from error
            if duplicate:
                raise _DuplicateKey(problem=str(key), problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _construct_int(loader: Any, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    sign = -1 if text.startswith("-") else 1
    digits = text.lstrip("+-")
    base = {"0x": 16, "0o": 8, "0b": 2}.get(digits[:2].lower(), 10)
    return sign * int(digits if base == 10 else digits[2:], base)


def _construct_float(loader: Any, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).replace("_", "").lower()
    if text.lstrip("+-") in (".inf", ".nan"):
        return float(text.replace(".", ""))
    return float(text)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("int", r"[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}",
        re.compile(rf"^(?:{_pattern})$"),
        ["" if letter == "\0" else letter for letter in _first],
    )
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_yaml(text: str, name: str) -> dict[Any, Any]:
    """The mapping that `text` holds; `name` is what error messages call it."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except _DuplicateKey as error:
        line = error.problem_mark.line + 1
        raise UserError(
            f"{name}, line {line}: the key `{error.problem}` is given twice in one mapping; keep one of them."
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        problem = error.problem or error.context or "unreadable"
        raise UserError(f"{where}: not valid YAML ({problem}); mend that line.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{name}: not valid YAML ({' '.join(str(error).split())}); mend the file.") from None
    except ValueError as error:
        raise UserError(f"{name}: a number in it cannot be read ({error}); mend the file.") from None
    except RecursionError:
        raise UserError(f"{name}: nested too deeply to be read; mend the file.") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{name}: holds {_article(value)}; it must hold a mapping of keys to values.")
    return value


def read_yaml(path: Path | str) -> dict[Any, Any]:
    """The mapping in a YAML file. Floats and booleans as in YAML 1.2; unquoted integer keys stay integers.

    Raises UserError when the file is missing, is not YAML, repeats a key, or is not a mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path.name} is missing: there is none in {path.parent.absolute()}.") from None
    except IsADirectoryError:
        raise UserError(f"{path.name} is a directory; it must be a YAML file.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path.name}: not UTF-8 text (byte {error.start}); save it as UTF-8.") from None
    return parse_yaml(text, path.name)


def _article(value: object) -> str:
    return {list: "a list", str: "one string", bool: "one boolean"}.get(type(value), "one value")


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a crash, sees the old file or the new one, nothing between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
