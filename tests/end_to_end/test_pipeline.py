"""The whole pipeline with the small recipe, through the command line. The tests of this module go in order."""

from __future__ import annotations

import json
import re
import shutil

import pyarrow.parquet as pq
import pytest

from tests.end_to_end.conftest import STAGES, Project

CHECKPOINTS = ["base", "sft", "rl@1", "rl@2", "student"]


def test_it_ends_with_a_table_a_path_and_two_commands(project):
    closing = project.first_output
    for stage in STAGES:
        assert re.search(rf"^{re.escape(stage)} ", closing, re.MULTILINE), closing
    assert "data/distill" in closing
    assert len(re.findall(r"^\s+ratchet ", closing, re.MULTILINE)) == 2


def test_nothing_reached_for_the_network(project):
    assert not project.connections.exists(), project.connections.read_text()


def test_metrics_hold_every_checkpoint(project):
    metrics = json.loads((project.root / "data/evaluate/metrics.json").read_text())
    families = set(pq.read_table(project.root / "data/synthesize/problems.parquet")["family"].to_pylist())
    assert len(families) >= 3
    assert list(metrics["checkpoints"]) == CHECKPOINTS
    for found in metrics["checkpoints"].values():
        assert found["accuracy"].keys() == {"mean", "low", "high", "n"}
        assert found["accuracy"]["low"] <= found["accuracy"]["mean"] <= found["accuracy"]["high"]
        assert set(found["families"]) == families
    sizes = {name: found["parameters"] for name, found in metrics["checkpoints"].items()}
    assert sizes["student"] <= sizes["rl@2"] / 2


def test_rows_can_be_walked_from_an_evaluation_sample_to_its_problem_and_from_a_rollout_to_its_group(project):
    data = project.root / "data"
    problems = {row["id"]: row for row in pq.read_table(data / "synthesize/problems.parquet").to_pylist()}
    for row in pq.read_table(data / "evaluate/samples.parquet").to_pylist():
        assert problems[row["problem_id"]]["split"] == "test"
    kept = set(pq.read_table(data / "filter/problems.parquet")["id"].to_pylist())
    samples = set(pq.read_table(data / "filter/samples.parquet")["id"].to_pylist())
    for decision in pq.read_table(data / "filter/decisions.parquet").to_pylist():
        assert decision["reason"]
        assert decision["kept"] == (decision["problem_id"] in kept)
        assert set(decision["parents"][1:]) <= samples
    rollouts = pq.read_table(data / "rl/1/rollouts.parquet").to_pylist()
    assert len(rollouts) == 4 * 8 * 4
    assert {row["problem_id"] for row in rollouts} <= kept
    chosen = pq.read_table(data / "reward/samples.parquet").to_pylist()
    right = {row["id"]: row["correct"] for row in chosen}
    for pair in pq.read_table(data / "reward/pairs.parquet").to_pylist():
        assert right[pair["chosen_id"]] and not right[pair["rejected_id"]]


def test_every_execution_has_one_mlflow_run_with_what_it_was_made_of(project):
    runs = {run.data.tags["ratchet.stage"]: run for run in project.runs()}
    assert len(project.runs()) == len(STAGES) and set(runs) == set(STAGES)
    assert runs["rl@1"].data.params["rl.optimiser.lr"]
    assert len({dataset.dataset.digest for dataset in runs["rl@1"].inputs.dataset_inputs}) == 3
    client, _ = project.mlflow()
    assert len(client.get_metric_history(runs["sft"].info.run_id, "loss/cross_entropy")) == 60

    def output(stage: str) -> str:
        return runs[stage].outputs.model_outputs[0].model_id

    def inputs(stage: str) -> set[str]:
        return {model.model_id for model in runs[stage].inputs.model_inputs}

    assert output("base") in inputs("sft")
    assert {output("sft"), output("reward")} == inputs("rl@1")
    assert output("rl@1") in inputs("rl@2")
    assert output("rl@2") in inputs("distill")


def test_nothing_to_do_runs_nothing(project):
    assert {state for state, _ in project.plan().values()} == {"fresh"}
    before = len(project.runs())
    project.ratchet("run")
    assert len(project.runs()) == before


def test_an_audit_goes_back_to_the_raw_data(project, tmp_path):
    report = json.loads(project.ratchet("audit", "distill", "--json"))
    text = json.dumps(report)
    for stage in ("base", "synthesize", "sft", "filter", "reward", "rl@1", "rl@2", "distill"):
        assert f'"{stage}"' in text
    copy = tmp_path / "some copy"
    shutil.copytree(project.root / "data/distill", copy)
    assert json.loads(project.ratchet("audit", str(copy), "--json"))["stage"] == "distill"
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "model.safetensors" in project.ratchet("audit", str(copy), code=2)


def test_a_checkpoint_answers(project):
    answer = project.ratchet("generate", "data/distill", "--prompt", "What is the remainder of 123 divided by 7?")
    assert answer.strip()


def test_an_rl_parameter_touches_rl_and_what_follows(project):
    project.edit("params.yaml", "clip_high: 0.28", "clip_high: 0.3")
    plan = project.plan()
    assert [name for name, (state, _) in plan.items() if state == "fresh"] == STAGES[:5]
    assert plan["rl@1"] == ("stale", ["parameter rl.loss.clip_high 0.28 -> 0.3"])
    assert plan["distill"][0] == plan["evaluate"][0] == "may-become-stale"


def test_a_single_stage_refuses_while_something_above_is_stale(project):
    assert "rl@1" in project.ratchet("run", "distill", code=2)


def test_going_back_restores_from_the_cache(project):
    before, original = len(project.runs()), project.bytes()
    project.ratchet("run", "rl@1")
    changed = project.bytes()
    assert changed["rl/1/rollouts.parquet"] == original["rl/1/rollouts.parquet"] or changed != original
    assert len(project.runs()) == before + 1
    project.edit("params.yaml", "clip_high: 0.3", "clip_high: 0.28")
    project.ratchet("run")
    assert len(project.runs()) == before + 1
    assert project.bytes() == original
    assert {state for state, _ in project.plan().values()} == {"fresh"}


def test_code_that_only_rl_imports_makes_rl_stale_and_is_named(project):
    project.edit("pipelines/rl/advantages.py", "_STD_FLOOR = 1e-4", "_STD_FLOOR = 2e-4")
    plan = project.plan()
    assert plan["rl@1"] == ("stale", ["code pipelines/rl/advantages.py changed"])
    assert [name for name, (state, _) in plan.items() if state == "fresh"] == STAGES[:5]
    project.edit("pipelines/rl/advantages.py", "_STD_FLOOR = 2e-4", "_STD_FLOOR = 1e-4")
    assert project.plan()["rl@1"][0] == "fresh"


def test_a_docstring_makes_nothing_stale(project):
    project.edit("pipelines/rl/advantages.py", '"""Group-relative advantages.', '"""Advantages relative to a group.')
    assert {state for state, _ in project.plan().values()} == {"fresh"}


def test_a_failing_stage_says_so_and_leaves_everything_as_it_was(project):
    lock, original = (project.root / "dvc.lock").read_bytes(), project.bytes()
    project.edit("params.yaml", "pairs_per_problem: 2", "pairs_per_problem: 1")
    project.edit("params.yaml", "heldout_share: 0.2", "heldout_share: 0.000001")
    said = project.ratchet("run", "reward", code=2)
    assert "reward" in said and "heldout" in said and "Traceback" not in said
    assert (project.root / "dvc.lock").read_bytes() == lock
    assert project.bytes() == original
    project.git("checkout", "-q", "params.yaml")
    project.ratchet("recipe", "small")
    assert project.plan()["reward"][0] == "fresh"


def test_another_run_from_scratch_elsewhere_gives_the_same_bytes(project, tmp_path):
    other = Project(tmp_path / "elsewhere" / "deeper")
    other.ratchet("recipe", "small")
    other.ratchet("run")
    first, second = project.bytes(), other.bytes()
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


@pytest.mark.parametrize("stage", ["sft", "reward", "rl@1", "distill"])
def test_kill_9_of_a_stage_and_the_rerun_resumes_to_the_same_bytes(project, stage):
    from tests.end_to_end.killing import kill_while_training

    original = project.bytes()
    kill_while_training(project, stage)
    project.ratchet("run")
    assert project.outcome(stage)["resumed_from"]
    assert project.bytes() == original
