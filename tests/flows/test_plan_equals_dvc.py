"""The plan's verdicts are those of `dvc status`, whatever was done to the project."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from toy_project import STAGES, Toy

from flows.plan import make_plan

OUTS = {name: f"data/{name.replace('@', '/')}" for name in STAGES}
SECTIONS = ["base", "synthesize", "sft", "filter", "reward", "rl", "distill", "evaluate"]

sections, stages = st.sampled_from(SECTIONS), st.sampled_from(STAGES)
operations = st.one_of(
    st.tuples(st.just("parameter"), sections, st.integers(0, 2)),
    st.tuples(st.just("new_parameter"), sections, st.booleans()),
    st.tuples(st.just("raw"), st.integers(0, 2)),
    st.tuples(st.just("edit_output"), stages),
    st.tuples(st.just("add_to_output"), stages),
    st.tuples(st.just("touch_output"), stages),
    st.tuples(st.just("delete_output"), stages),
    st.tuples(st.just("drop_cache"), stages),
    st.tuples(st.just("command"), st.sampled_from(["base", "sft", "evaluate"]), st.booleans()),
    st.tuples(st.just("dependency"), st.sampled_from(["sft", "reward"]), st.booleans()),
    st.tuples(st.just("forget"), stages),
    st.tuples(st.just("dvc_single"), stages),
    st.tuples(st.just("dvc_all")),
)


class Changer(Toy):
    """Does to a project what people do to it."""

    def parameter(self, section: str, value: int) -> None:
        self.set(f"{section}.value", value)

    def new_parameter(self, section: str, present: bool) -> None:
        params = yaml.safe_load((self.root / "params.yaml").read_text())
        params[section].pop("extra", None)
        if present:
            params[section]["extra"] = {"deep": [1, 0.5]}
        (self.root / "params.yaml").write_text(yaml.safe_dump(params))

    def raw(self, number: int) -> None:
        (self.root / "data/raw/problems.txt").write_text(f"1 + {number}\n")

    def edit_output(self, stage: str) -> None:
        self._write(stage, "value.json", "edited by hand")

    def add_to_output(self, stage: str) -> None:
        self._write(stage, "deep/er/extra.txt", "added by hand")

    def _write(self, stage: str, name: str, text: str) -> None:
        path = self.root / OUTS[stage] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def touch_output(self, stage: str) -> None:
        path = self.root / OUTS[stage] / "value.json"
        if path.exists():
            os.utime(path)

    def delete_output(self, stage: str) -> None:
        shutil.rmtree(self.root / OUTS[stage], ignore_errors=True)

    def drop_cache(self, stage: str) -> None:
        entry = self._lock()["stages"].get(stage)
        if entry:
            md5 = entry["outs"][0]["md5"]
            (self.root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]).unlink(missing_ok=True)

    def command(self, stage: str, changed: bool) -> None:
        document = self._graph()
        words = document["stages"][stage]["cmd"].removesuffix(" data/raw/problems.txt")
        document["stages"][stage]["cmd"] = words + (" data/raw/problems.txt" if changed else "")
        (self.root / "dvc.yaml").write_text(yaml.safe_dump(document, sort_keys=False))

    def dependency(self, stage: str, added: bool) -> None:
        document = self._graph()
        deps = document["stages"][stage]["deps"]
        document["stages"][stage]["deps"] = [d for d in deps if d != "data/raw"] + (["data/raw"] if added else [])
        (self.root / "dvc.yaml").write_text(yaml.safe_dump(document, sort_keys=False))

    def forget(self, stage: str) -> None:
        lock = self._lock()
        lock["stages"].pop(stage, None)
        (self.root / "dvc.lock").write_text(yaml.safe_dump(lock))

    def dvc_single(self, stage: str) -> None:
        self._dvc(lambda repo: repo.reproduce(stage, single_item=True))

    def dvc_all(self) -> None:
        self._dvc(lambda repo: repo.reproduce())

    def _dvc(self, action: Callable[[Any], Any]) -> None:
        from dvc.exceptions import DvcException
        from dvc.repo import Repo

        try:
            with Repo(str(self.root)) as repo:
                action(repo)
        except DvcException:
            return  # a stage whose input is missing fails; the plan must be right afterwards too

    def _graph(self) -> dict[str, Any]:
        return yaml.safe_load((self.root / "dvc.yaml").read_text())

    def _lock(self) -> dict[str, Any]:
        return yaml.safe_load((self.root / "dvc.lock").read_text())


def compare(root: Path) -> None:
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        status = repo.status()
    plan = {s.name: s for s in make_plan(root)}
    damaged = {
        out for entries in status.values() for e in entries if isinstance(e, dict) for out in e.get("changed outs", {})
    }
    for name in STAGES:
        complaints = status.get(name, [])
        own = []
        for complaint in complaints:
            if isinstance(complaint, dict) and "changed deps" in complaint:
                own += [d for d in complaint["changed deps"] if not _overlaps(d, damaged)]
            else:
                own.append(complaint)
        assert plan[name].is_due or not own, (name, complaints, plan[name])
        assert complaints or not plan[name].is_due, (name, complaints, plan[name])
        assert not complaints or plan[name].state != "fresh", (name, complaints, plan[name])


def _overlaps(path: str, others: set[str]) -> bool:
    return any(path == o or path.startswith(o + "/") or o.startswith(path + "/") for o in others)


@settings(
    max_examples=int(os.environ.get("RATCHET_EXAMPLES", "4")),
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    derandomize="RATCHET_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(steps=[("drop_cache", "sft"), ("delete_output", "reward"), ("dependency", "reward", True)])
@example(steps=[("command", "sft", True), ("dvc_single", "sft"), ("edit_output", "sft"), ("forget", "base")])
@example(steps=[("parameter", "rl", 2), ("touch_output", "rl@1"), ("add_to_output", "rl@2"), ("raw", 2)])
@given(steps=st.lists(operations, min_size=1, max_size=6))
def test_plan_agrees_with_dvc_status(
    built_template: Path, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]]
) -> None:
    root = tmp_path_factory.mktemp("example") / "project"
    shutil.copytree(built_template, root, symlinks=True)
    changer = Changer(root)
    with chdir(root):
        compare(root)
        for operation, *arguments in steps:
            getattr(changer, operation)(*arguments)
            compare(root)
    shutil.rmtree(root)


def test_dvc_resolves_dvc_yaml_to_the_same_stages(toy: Toy) -> None:
    from dvc.repo import Repo

    from tasks.graph import load_graph

    with chdir(toy.root), Repo(str(toy.root)) as repo:
        theirs = {stage.addressing: stage for stage in repo.index.stages}
        edges = {(a.addressing, b.addressing) for a, b in repo.index.graph.edges()}
    graph = load_graph(toy.root)
    assert set(graph.nodes) == set(theirs)
    for name, node in graph.nodes.items():
        stage = theirs[name]
        params = {d.def_path: tuple(d.params) for d in stage.deps if hasattr(d, "params")}
        assert node.command == stage.cmd
        assert set(node.outs) == {out.def_path for out in stage.outs}
        assert set(node.deps) == {d.def_path for d in stage.deps if not hasattr(d, "params")}
        assert {f: set(k) for f, k in node.params.items()} == {f: set(k) for f, k in params.items()}
    assert {(n, p) for n in graph.nodes for p in graph.parents(n)} == edges
