from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.errors import UserError
from tasks.graph import Graph, load_graph

DVC = """
stages:
  base:
    cmd: python -m tasks.base
    params: [seed, base, {code.lock: [base]}]
    outs: [data/base]
  sft:
    cmd: python -m tasks.sft
    deps: [data/base]
    outs: [data/sft]
  rl:
    foreach: ${rounds}
    do:
      cmd: python -m tasks.rl ${key}
      deps: ['${item.init}', data/raw]
      params: ['rounds.${key}', rl]
      outs: ['data/rl/${key}']
  distill:
    cmd: echo ${distill.teacher} ${distill.flag}
    deps: ['${distill.teacher}']
    outs: [data/distill]
  evaluate:
    cmd: python -m tasks.evaluate
    deps: [data/rl, data/distill/model.safetensors]
    params: [{other.yaml: null}]
    outs: [data/evaluate]
"""
PARAMS = """
rounds: {"1": {init: data/sft}, "2": {init: data/rl/1}}
distill: {teacher: data/rl/2, flag: true}
"""


def graph_of(root: Path, dvc: str = DVC, params: str = PARAMS) -> Graph:
    (root / "dvc.yaml").write_text(dvc)
    (root / "params.yaml").write_text(params)
    return load_graph(root)


def test_stages_are_filled_in_and_ordered(tmp_path: Path) -> None:
    graph = graph_of(tmp_path)
    assert list(graph.nodes) == ["base", "sft", "rl@1", "rl@2", "distill", "evaluate"]
    second = graph.nodes["rl@2"]
    assert (second.group, second.key, second.module) == ("rl", "2", "tasks.rl")
    assert second.command == "python -m tasks.rl 2"
    assert second.deps == ("data/rl/1", "data/raw")
    assert second.params == {"params.yaml": ("rounds.2", "rl")}
    assert graph.nodes["base"].params == {"params.yaml": ("seed", "base"), "code.lock": ("base",)}
    assert graph.nodes["evaluate"].params == {"other.yaml": ()}
    assert graph.nodes["distill"].module is None
    assert graph.nodes["distill"].command == "echo data/rl/2 true"


def test_an_edge_is_an_equal_an_inner_or_an_outer_path(tmp_path: Path) -> None:
    graph = graph_of(tmp_path)
    assert set(graph.parents("evaluate")) == {"rl@1", "rl@2", "distill"}
    assert graph.parents("rl@2") == ("rl@1",)
    assert graph.children("rl@2") == ("distill", "evaluate")
    assert graph.ancestors("rl@2") == ["base", "sft", "rl@1"]
    assert graph.descendants("rl@1") == ["rl@2", "distill", "evaluate"]
    assert graph.producer("data/rl/2/model.safetensors") is graph.nodes["rl@2"]
    assert graph.producer("data/raw") is None
    assert graph.group_directories == {"data/rl"}


def test_a_group_stands_for_its_stages_and_a_typo_gets_a_hint(tmp_path: Path) -> None:
    graph = graph_of(tmp_path)
    assert graph.resolve("rl") == ["rl@1", "rl@2"]
    with pytest.raises(UserError, match="Did you mean `evaluate`"):
        graph.resolve("evalute")


def test_a_project_without_dvc_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a Ratchet project"):
        load_graph(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("do:\n", "done:\n"), "`foreach` needs a `do:`"),
        (('"1": {init', "1: {init"), "the key 1 is not quoted"),
        (("${item.init}", "${item.start}"), "`${item.start}` is unknown"),
        (("${distill.teacher} ", "${distill} "), "not a plain value"),
        (("deps: [data/base]", "deps: [data/evaluate]"), "in a circle: sft"),
        (("deps: [data/base]", "deps: [data/sft]"), "reads its own output"),
        (("outs: [data/sft]", "outs: [data/base/sub]"), "base and sft both write data/base/sub"),
        (("outs: [data/sft]", "outs: [{data/sft: {persist: true}}]"), "`persist` is not supported"),
        (("outs: [data/sft]", "outs: [{data/sft: {cache: false}}]"), "`cache: false` is not supported"),
        (("outs: [data/sft]", "outs: [/tmp/sft]"), "must lie inside the project"),
        (("outs: [data/sft]", "outs: data/sft"), "must be a list"),
        (("    cmd: python -m tasks.sft\n", ""), "stages.sft.cmd: must be one command line"),
        (
            ("    cmd: python -m tasks.sft\n", "    cmd: x\n    wdir: src\n"),
            "stages.sft.wdir: this field is not supported",
        ),
        (("stages:", "steps:"), "it has no stages"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in DVC + PARAMS
    with pytest.raises(UserError) as error:
        graph_of(tmp_path, DVC.replace(*change), PARAMS.replace(*change))
    assert message in str(error.value)


def test_a_list_of_rounds_uses_its_values_as_keys(tmp_path: Path) -> None:
    dvc = "stages:\n  each:\n    foreach: [a, 2]\n    do:\n      cmd: echo ${item}\n      outs: ['out/${item}']\n"
    assert [n.command for n in graph_of(tmp_path, dvc, "").nodes.values()] == ["echo a", "echo 2"]
