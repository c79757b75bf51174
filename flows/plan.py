"""Which stages are stale and why, in words: from dvc.yaml, dvc.lock and the disk, without calling DVC.

The verdict on each stage is that of `dvc status`, with two differences. A stage whose input was damaged on
disk is not called stale for it, because the stage that makes the input restores it first. And stages below a
stale one are named too, as those that may become stale; they are judged again when the stage above has run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flows import dvcfiles
from flows.locks import run_in_progress
from pipelines.errors import UserError
from tasks import codelock, digests
from tasks.graph import PARAMS_FILE, Graph, Node, load_graph
from tasks.yamlfile import read_yaml

FRESH, STALE, MAY, MISSING, ORPHAN = "fresh", "stale", "may-become-stale", "missing", "orphan"
_ABSENT = object()


@dataclass(frozen=True)
class StageState:
    """One line of the plan."""

    name: str
    state: str
    reasons: list[str] = field(default_factory=list)

    @property
    def is_due(self) -> bool:
        """Whether the stage must run whatever happens above it."""
        return self.state in (STALE, MISSING)


def make_plan(root: Path | str, refresh: bool = True) -> list[StageState]:
    """The state of every stage, in topological order, then the leftover outputs that no stage declares.

    `refresh` brings code.lock up to date first. While a run is in progress the file is left alone, because
    DVC reads it when a stage ends, and the plan compares with what it would say.
    """
    root = Path(root).absolute()
    graph = load_graph(root)
    validate(root, graph)
    if not refresh:
        code = codelock.read(root)
    elif run_in_progress(root):
        code = codelock.build(root, graph)
    else:
        try:
            code = codelock.refresh(root, graph)
        except PermissionError:  # a project we may only look at
            code = codelock.build(root, graph)
    return Judge(graph, code).plan()


def validate(root: Path, graph: Graph) -> None:
    """Check params.yaml against the stages' parameter models, for projects whose stages have them."""
    if any(node.module for node in graph.nodes.values()):
        from tasks.settings import load_params

        load_params(root)


class Judge:
    """Compares what dvc.lock recorded with what is there now. One instance sees one moment."""

    def __init__(self, graph: Graph, code: dict[str, Any]) -> None:
        self.graph, self.root, self.code = graph, graph.root, code
        self.lock = dvcfiles.read_lock(self.root)
        self._digests: dict[str, str | None] = {}
        self._files: dict[str, dict[Any, Any]] = {codelock.FILE: code}

    def plan(self) -> list[StageState]:
        states: dict[str, StageState] = {}
        for node in self.graph.nodes.values():
            state = self.state(node)
            if state.state == FRESH:
                above = [n for n in self.graph.ancestors(node.name) if states[n].is_due]
                if above:
                    state = StageState(node.name, MAY, [f"behind {name}" for name in above])
            states[node.name] = state
        leftovers = [
            StageState(path, ORPHAN, ["no stage declares it; the next run moves it to .ratchet/orphans"])
            for path in self.orphans
        ]
        return [*states.values(), *leftovers]

    def state(self, node: Node) -> StageState:
        """The state of a stage by itself: fresh, stale or missing."""
        missing = any(self.digest(out) is None for out in node.outs)
        entry = self.lock.get(node.name)
        if entry is None:
            if missing:
                return StageState(node.name, MISSING, ["never built"])
            return StageState(node.name, STALE, ["dvc.lock does not say what its output was made of"])
        reasons = [*self._reasons(node, entry)]
        return StageState(node.name, (MISSING if missing else STALE) if reasons else FRESH, reasons)

    def _reasons(self, node: Node, entry: dict[str, Any]) -> Iterator[str]:
        if entry.get("cmd") != node.command:
            yield "command changed"
        locked = entry.get("params") or {}
        for file, keys in node.params.items():
            yield from self._parameter_reasons(file, keys, locked.get(file))
        yield from self._input_reasons(node, dvcfiles.recorded(entry, "deps"))
        yield from self._output_reasons(node, dvcfiles.recorded(entry, "outs"))
        if forced_mark(self.root, node.name).exists():
            yield "a forced rerun of it did not finish"

    def _parameter_reasons(self, file: str, keys: tuple[str, ...], locked: Any) -> Iterator[str]:
        before_all = locked if isinstance(locked, dict) else {}
        now_all = self.parameters(file, keys or tuple(dict.fromkeys([*self._file(file), *before_all])))
        if locked is None and not now_all:
            yield f"parameters of {file} are new to this stage"
        label = "parameter " if file == PARAMS_FILE else f"parameter {file}: "
        for key in dict.fromkeys([*now_all, *(keys or before_all)]):
            before, now = before_all.get(key, _ABSENT), now_all.get(key, _ABSENT)
            if before is _ABSENT and now is _ABSENT:
                yield f"{label}{key} is missing"
            elif before != now:
                if file == codelock.FILE and isinstance(before, dict) and isinstance(now, dict):
                    yield from codelock.explain(before, now)
                elif file == codelock.FILE:
                    yield f"code of {key} was not recorded" if before is _ABSENT else f"code of {key} is gone"
                else:
                    yield from (label + text for text in differences(key, before, now))

    def _input_reasons(self, node: Node, locked: dict[str, str]) -> Iterator[str]:
        for dep in node.deps:
            now, before = self.digest(dep), locked.get(dep)
            if now == before and now is not None:
                continue
            producers = self.graph.producers(dep)
            damaged = [p for p in producers if not self._is_intact(p)]
            if damaged and not self._is_settled(dep, damaged, before):
                continue
            if now is None and not damaged:
                yield f"input {dep} is missing"
            else:
                yield f"input {dep} changed" if before else f"input {dep} is new to this stage"

    def _is_settled(self, dep: str, damaged: list[Node], before: str | None) -> bool:
        """Whether the input differs from the recorded one even after the damaged output is restored."""
        if len(damaged) != 1 or dep not in damaged[0].outs:
            return False
        made = dvcfiles.recorded(self.lock.get(damaged[0].name) or {}, "outs").get(dep)
        return bool(made) and made != before

    def _is_intact(self, node: Node) -> bool:
        locked = dvcfiles.recorded(self.lock.get(node.name) or {}, "outs")
        return all(locked.get(out) and self.digest(out) == locked[out] for out in node.outs)

    def _output_reasons(self, node: Node, locked: dict[str, str]) -> Iterator[str]:
        for out in node.outs:
            now, before = self.digest(out), locked.get(out)
            if now is None:
                yield f"output {out} is missing"
            elif before is None:
                yield f"output {out} is new to this stage"
            elif now != before:
                yield f"output {out} was modified"
            elif not dvcfiles.is_cached(self.root, before):
                yield f"output {out} is not in DVC's cache"

    def digest(self, path: str) -> str | None:
        """DVC's digest of a path of the project, None when it does not exist. Orphans do not count."""
        if path not in self._digests:
            prefix = path + "/"
            without = [o.removeprefix(prefix) for o in self.orphans if o.startswith(prefix)]
            is_orphan = any((path + "/").startswith(o + "/") for o in self.orphans)
            try:
                self._digests[path] = None if is_orphan else digests.dvc_md5(self.root / path, without)
            except FileNotFoundError:
                self._digests[path] = None
        return self._digests[path]

    def _file(self, file: str) -> dict[Any, Any]:
        if file not in self._files:
            path = self.root / file
            self._files[file] = read_yaml(path) if path.exists() or file == PARAMS_FILE else {}
        return self._files[file]

    def parameters(self, file: str, keys: tuple[str, ...]) -> dict[str, Any]:
        """The present values of dotted keys; keys that are not there are left out."""
        found = {}
        for key in keys:
            value: Any = self._file(file)
            for part in str(key).split("."):
                if isinstance(value, dict) and part in value:
                    value = value[part]
                elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
                    value = value[int(part)]
                else:
                    break
            else:
                found[key] = value
        return found

    def ingredients(self, node: Node) -> dict[str, Any]:
        """What dvc.lock will say went into the stage if it runs now and nothing changes meanwhile."""
        params = {file: self.parameters(file, keys or tuple(self._file(file))) for file, keys in node.params.items()}
        return {"cmd": node.command, "params": params, "deps": {dep: self.digest(dep) for dep in node.deps}}

    @cached_property
    def orphans(self) -> list[str]:
        """Outputs on disk beside those of a `foreach` group that no stage declares any more."""
        declared = [out for node in self.graph.nodes.values() for out in node.outs]
        found = []
        for directory in sorted(self.graph.group_directories):
            path = self.root / directory
            for child in sorted(path.iterdir()) if path.is_dir() else []:
                name = f"{directory}/{child.name}"
                if not child.name.startswith(".") and not any((o + "/").startswith(name + "/") for o in declared):
                    found.append(name)
        return found


def forced_mark(root: Path, stage: str) -> Path:
    """A file that exists from the start of a forced rerun until one finishes."""
    return root / ".ratchet" / "forced" / stage


def differences(key: str, before: Any, now: Any) -> Iterator[str]:
    """What changed between two values of a parameter, one text per leaf."""
    if isinstance(before, dict) and isinstance(now, dict):
        for part in dict.fromkeys([*before, *now]):
            old, new = before.get(part, _ABSENT), now.get(part, _ABSENT)
            if old != new:
                yield from differences(f"{key}.{part}", old, new)
    elif before is _ABSENT:
        yield f"{key} is new ({show(now)})"
    elif now is _ABSENT:
        yield f"{key} was removed (it was {show(before)})"
    else:
        yield f"{key} {show(before)} -> {show(now)}"


def show(value: Any) -> str:
    """A parameter value on one line, cut when long."""
    text = value if isinstance(value, str) and value else json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def refuse_lacking_engine(judge: Judge, plan: dict[str, StageState], selected: set[str]) -> None:
    """Raise UserError when a selected stage that is to run samples with vLLM, and vLLM is not installed."""
    sampling = [
        node
        for name, node in judge.graph.nodes.items()
        if name in selected
        and plan[name].state != FRESH
        and node.module
        and "engine" in node.params.get(PARAMS_FILE, ())
    ]
    if not sampling or find_spec("vllm"):
        return
    from tasks.settings import load_params

    settings = load_params(judge.root)
    for node in sampling:
        engine = getattr(settings.section(node.group), "engine", None) or settings.engine
        if engine.name == "vllm" and engine.url is None:
            raise UserError(
                f"Stage {node.name} samples with vLLM, which is not installed here: docs/vllm.md says how to, or set "
                "engine: {name: native}."
            )


def refuse_missing_inputs(judge: Judge, plan: dict[str, StageState], selected: set[str]) -> None:
    """Raise UserError when a selected stage reads something that is not there and that no stage makes."""
    for name, node in judge.graph.nodes.items():
        for dep in node.deps if name in selected and plan[name].is_due else ():
            if judge.digest(dep) is None and not judge.graph.producers(dep):
                raise UserError(f"{name} reads {dep}, which does not exist and which no stage makes; put it there.")


def refuse_stale_above(graph: Graph, plan: dict[str, StageState], selected: set[str]) -> None:
    """Raise UserError when a selected stage stands on one that is not fresh and not selected."""
    for name in graph.nodes:
        if name not in selected:
            continue
        above = [n for n in graph.ancestors(name) if n not in selected and plan[n].is_due]
        if above:
            causes = "; ".join(f"{n} is {plan[n].state} ({', '.join(plan[n].reasons[:3])})" for n in above[:4])
            raise UserError(
                f"{name} stands on stages that are not up to date: {causes}.\n"
                f"Run them too with `ratchet run {name} --upstream`."
            )
