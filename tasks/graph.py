"""The one reader of dvc.yaml: stages, what they read and write, and who comes before whom."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipelines.errors import UserError
from tasks.yamlfile import read_yaml

PARAMS_FILE = "params.yaml"
_PLACEHOLDER = re.compile(r"(?<!\\)\$\{(.*?)\}")
_MODULE = re.compile(r"^python3? -m (tasks\.\w+)(?: |$)")
_KNOWN = frozenset({"cmd", "deps", "params", "outs", "metrics", "plots", "desc", "meta"})


@dataclass(frozen=True)
class Node:
    """One stage of dvc.yaml with every `${}` filled in."""

    name: str
    group: str
    key: str | None
    command: str
    module: str | None
    deps: tuple[str, ...]
    outs: tuple[str, ...]
    params: Mapping[str, tuple[str, ...]] = field(hash=False)  # file -> keys; no keys means the whole file


class Graph:
    """The stages in topological order, and their edges."""

    def __init__(self, root: Path, nodes: list[Node], group_directories: frozenset[str] = frozenset()) -> None:
        self.root = root
        self.group_directories = group_directories
        """Directories whose children are the outputs of one `foreach` group, such as data/rl."""
        by_name = {node.name: node for node in nodes}
        self._parents = {node.name: tuple(_parents_of(node, nodes)) for node in nodes}
        self.nodes = {name: by_name[name] for name in _topological(self._parents)}

    @cached_property
    def _children(self) -> dict[str, tuple[str, ...]]:
        return {name: tuple(n for n in self.nodes if name in self._parents[n]) for name in self.nodes}

    def parents(self, name: str) -> tuple[str, ...]:
        return self._parents[name]

    def children(self, name: str) -> tuple[str, ...]:
        return self._children[name]

    def ancestors(self, name: str) -> list[str]:
        """Every stage above `name`, in topological order."""
        return self._closure(name, self._parents)

    def descendants(self, name: str) -> list[str]:
        """Every stage below `name`, in topological order."""
        return self._closure(name, self._children)

    def _closure(self, name: str, edges: Mapping[str, tuple[str, ...]]) -> list[str]:
        found: set[str] = set()
        waiting = list(edges[name])
        while waiting:
            current = waiting.pop()
            if current not in found:
                found.add(current)
                waiting.extend(edges[current])
        return [n for n in self.nodes if n in found]

    def producer(self, path: str | Path) -> Node | None:
        """The stage whose output is `path` or holds it; None for raw inputs."""
        text = Path(path).as_posix()
        for node in self.nodes.values():
            if any(text == out or text.startswith(out + "/") for out in node.outs):
                return node
        return None

    def producers(self, path: str) -> list[Node]:
        """The stages whose outputs `path` overlaps: equal to it, above it, or below it."""
        return [node for node in self.nodes.values() if any(_overlap(path, out) for out in node.outs)]

    @property
    def groups(self) -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = {}
        for node in self.nodes.values():
            found.setdefault(node.group, []).append(node)
        return found

    def resolve(self, name: str) -> list[str]:
        """Stage names for what a person typed: a stage, or a `foreach` group standing for all its stages."""
        if name in self.nodes:
            return [name]
        group = [node.name for node in self.nodes.values() if node.group == name]
        if group:
            return group
        near = difflib.get_close_matches(name, [*self.nodes, *self.groups], n=1, cutoff=0.5)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise UserError(f"There is no stage `{name}` in dvc.yaml.{hint} Stages: {', '.join(self.nodes)}.")


def load_graph(root: Path | str) -> Graph:
    """Read dvc.yaml and params.yaml of the project in `root`.

    Raises UserError for a directory without dvc.yaml, an unknown `${}`, a cycle, or a feature of DVC that
    Ratchet does not use (wdir, matrix, vars, frozen, always_changed, persist).
    """
    root = Path(root)
    if not (root / "dvc.yaml").is_file():
        raise UserError(
            f"{root.absolute()} is not a Ratchet project: it has no dvc.yaml. "
            "Go to the project's directory, or name it with `ratchet -C DIRECTORY`."
        )
    document = read_yaml(root / "dvc.yaml")
    stages = document.get("stages") or {}
    if not isinstance(stages, dict) or not stages:
        raise UserError("dvc.yaml: it has no stages; `stages:` must map each stage's name to its definition.")
    if "vars" in document:
        raise UserError("dvc.yaml: `vars` is not supported; write the values into params.yaml.")
    is_needed = "${" in (root / "dvc.yaml").read_text(encoding="utf-8")
    values = read_yaml(root / PARAMS_FILE) if is_needed else {}
    nodes: list[Node] = []
    directories: set[str] = set()
    for name, definition in stages.items():
        if not isinstance(name, str) or not isinstance(definition, dict):
            raise UserError(f"dvc.yaml: stages.{name}: must be a name with a mapping below it.")
        if "foreach" in definition:
            template = definition.get("do")
            if not isinstance(template, dict):
                raise UserError(f"dvc.yaml: stages.{name}: `foreach` needs a `do:` with the stage's definition.")
            directories.update(_group_directories(template))
            for key, scope in _iterations(name, definition["foreach"], values):
                nodes.append(_node(f"{name}@{key}", name, key, template, {**values, **scope}))
        else:
            nodes.append(_node(name, name, None, definition, values))
    _refuse_shared_outputs(nodes)
    return Graph(root, nodes, frozenset(directories))


def _iterations(name: str, foreach: Any, values: dict[Any, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    where = f"dvc.yaml: stages.{name}.foreach"
    data = foreach
    source = "dvc.yaml"
    if isinstance(foreach, str):
        match = _PLACEHOLDER.fullmatch(foreach)
        if not match:
            raise UserError(f"{where}: must be a mapping, a list or one `${{key}}`, found {foreach!r}.")
        source = f"{PARAMS_FILE}: {match[1]}"
        data = _lookup(match[1], values, where)
    if isinstance(data, dict):
        for key, item in data.items():
            if not isinstance(key, str):
                raise UserError(
                    f"{source}: the key {key} is not quoted. DVC would then make no stage of it; "
                    f'write "{key}": instead of {key}:'
                )
            yield key, {"key": key, "item": item}
    elif isinstance(data, list):
        if any(isinstance(item, dict | list) for item in data):
            raise UserError(f"{source}: a list of plain values or a mapping is needed here, not a nested list.")
        for item in data:
            yield _text(item), {"item": item}
    else:
        raise UserError(f"{source}: must be a mapping or a list, found {data!r}.")


def _node(name: str, group: str, key: str | None, definition: dict[str, Any], scope: dict[Any, Any]) -> Node:
    where = f"dvc.yaml: stages.{name}"
    unknown = sorted(set(definition) - _KNOWN)
    if unknown:
        raise UserError(f"{where}.{unknown[0]}: this field is not supported; allowed: {', '.join(sorted(_KNOWN))}.")
    resolved = _fill({k: v for k, v in definition.items() if k not in ("desc", "meta")}, scope, where)
    command = resolved.get("cmd")
    if not isinstance(command, str) or not command:
        raise UserError(f"{where}.cmd: must be one command line, found {command!r}.")
    outs: list[str] = []
    for kind in ("outs", "metrics", "plots"):
        outs.extend(_paths(resolved.get(kind), f"{where}.{kind}"))
    match = _MODULE.match(command)
    return Node(
        name=name,
        group=group,
        key=key,
        command=command,
        module=match[1] if match else None,
        deps=tuple(_paths(resolved.get("deps"), f"{where}.deps")),
        outs=tuple(outs),
        params=_params(resolved.get("params"), f"{where}.params"),
    )


def _paths(entries: Any, where: str) -> list[str]:
    paths = []
    for entry in _list(entries, where):
        path, flags = entry, {}
        if isinstance(entry, dict) and len(entry) == 1:
            ((path, flags),) = entry.items()
        if not isinstance(path, str) or not path:
            raise UserError(f"{where}: every entry must be a path, found {entry!r}.")
        hides = [f for f in ("persist", "remote") if flags.get(f)] if isinstance(flags, dict) else []
        if isinstance(flags, dict) and flags.get("cache") is False:
            hides.append("cache: false")
        if hides:
            raise UserError(f"{where}: {path}: `{hides[0]}` is not supported, results could not be restored.")
        if path.startswith(("/", "~")) or ".." in path.split("/"):
            raise UserError(f"{where}: {path}: must lie inside the project.")
        paths.append(Path(path).as_posix())
    return paths


def _params(entries: Any, where: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    whole: set[str] = set()
    for entry in _list(entries, where):
        for file, keys in entry.items() if isinstance(entry, dict) else [(PARAMS_FILE, [entry])]:
            if keys is None or keys == []:
                whole.add(file)
            known = found.setdefault(file, [])
            known.extend(_text(key) for key in _list(keys, where) if _text(key) not in known)
    return {file: () if file in whole else tuple(keys) for file, keys in found.items()}


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(f"{where}: must be a list, found {value!r}.")
    return value


def _fill(value: Any, scope: dict[Any, Any], where: str) -> Any:
    if isinstance(value, dict):
        return {_fill(k, scope, where): _fill(v, scope, where) for k, v in value.items()}
    if isinstance(value, list):
        return [_fill(item, scope, where) for item in value]
    if not isinstance(value, str):
        return value

    def one(match: re.Match[str]) -> str:
        found = _lookup(match[1], scope, where)
        if isinstance(found, dict | list) or found is None:
            raise UserError(f"{where}: `${{{match[1]}}}` is not a plain value and cannot stand in a text.")
        return _text(found)

    return _PLACEHOLDER.sub(one, value).replace("\\${", "${")


def _lookup(expression: str, scope: dict[Any, Any], where: str) -> Any:
    value: Any = scope
    for part in expression.replace("[", ".").replace("]", "").split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise UserError(f"{where}: `${{{expression}}}` is unknown: {PARAMS_FILE} has no `{expression}`.")
    return value


def _text(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _group_directories(template: dict[str, Any]) -> set[str]:
    found = set()
    for entry in template.get("outs") or []:
        path = next(iter(entry)) if isinstance(entry, dict) else entry
        parent, _, last = str(path).rpartition("/")
        if parent and "${" in last and "${" not in parent:
            found.add(parent)
    return found


def _refuse_shared_outputs(nodes: list[Node]) -> None:
    outs = [(out, node.name) for node in nodes for out in node.outs]
    for index, (out, name) in enumerate(outs):
        for other, other_name in outs[:index]:
            if _overlap(out, other):
                raise UserError(
                    f"dvc.yaml: {other_name} and {name} both write {max(out, other, key=len)}; only one may."
                )


def _overlap(first: str, second: str) -> bool:
    return first == second or first.startswith(second + "/") or second.startswith(first + "/")


def _parents_of(node: Node, nodes: list[Node]) -> Iterator[str]:
    for other in nodes:
        if any(_overlap(dep, out) for dep in node.deps for out in other.outs):
            if other is node:
                raise UserError(f"dvc.yaml: stages.{node.name}: it reads its own output.")
            yield other.name


def _topological(parents: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Parents before children; among equals the order of dvc.yaml."""
    order: list[str] = []
    placed: set[str] = set()
    while len(order) < len(parents):
        ready = next((n for n in parents if n not in placed and placed.issuperset(parents[n])), None)
        if ready is None:
            circle = ", ".join(n for n in parents if n not in placed)
            raise UserError(f"dvc.yaml: these stages wait for each other in a circle: {circle}.")
        order.append(ready)
        placed.add(ready)
    return order
