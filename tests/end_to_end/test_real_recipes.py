"""The recipes for real models, run as far as that goes without network and GPU.

The hub is a cache with a data set of the same schema and models of the same architecture, shrunk; the engine is the
native one; everything else is as the recipes say, in fewer and smaller steps.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML

from tests.end_to_end.conftest import REPOSITORY, STAGES, Project
from tests.end_to_end.hub import add_data, add_model

SHRUNK = """
threads: 1
engine: {name: native}
sft: {steps: 4, batch_size: 16}
filter: {problems: 32, samples: 4, sampling: {max_new_tokens: 48}, keep: {low: 0.0, high: 1.0}}
reward: {problems: 48, samples: 4, steps: 4, batch_size: 4, sampling: {max_new_tokens: 48}}
rl: {steps: 2, problems_per_step: 6, group_size: 4, sampling: {max_new_tokens: 48}}
distill: {problems: 32, samples: 4, steps: 4, batch_size: 8, sampling: {max_new_tokens: 48}}
evaluate: {samples: 2, sampling: {max_new_tokens: 48}, reporting: {resamples: 100, transcripts: 1}}
"""
STUDENT = "distill: {student: {architecture: {hidden: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, mlp: 64}}}"
TWO_PROCESSES = "{distributed: {processes: 2}, evaluate: {engine: {name: native}}}"


def revisions(recipe: str) -> dict[str, str]:
    """What the recipe takes from the hub, by name."""
    overlay = YAML(typ="safe").load(REPOSITORY / "pipelines" / "recipes" / f"{recipe}.yaml")
    models = [overlay["base"]["source"], overlay["distill"]["student"]]
    found = {model["checkpoint"]: model["revision"] for model in models if model["kind"] == "import"}
    sources = [source["hub"] for source in overlay["synthesize"]["sources"]]
    return found | {source["dataset"]: source["revision"] for source in sources}


def run(tmp_path, recipe: str, *overlays: str, shapes: dict[str, tuple[int, int]]) -> Project:
    hub = tmp_path / "hub"
    named = revisions(recipe)
    add_data(hub, named["openai/gsm8k"], {"train": 200, "test": 12})
    for model, (hidden, layers) in shapes.items():
        add_model(hub, model, named[model], hidden, layers)
    project = Project(tmp_path / "project")
    project.environment |= {"HF_HUB_CACHE": str(hub), "HF_HUB_OFFLINE": "1"}
    for number, overlay in enumerate((SHRUNK, *overlays)):
        (project.root / "pipelines" / "recipes" / f"shrunk{number}.yaml").write_text(overlay)
    project.ratchet("recipe", recipe)
    for number in range(1 + len(overlays)):
        project.ratchet("recipe", f"shrunk{number}")
    project.ratchet("run")
    assert {state for state, _ in project.plan().values()} == {"fresh"}
    return project


def test_qwen3_06b_on_one_gpu(tmp_path):
    project = run(tmp_path, "real/qwen3-0.6b-gsm8k", STUDENT, shapes={"Qwen/Qwen3-0.6B": (64, 2)})
    data = project.root / "data"
    problems = pq.read_table(data / "synthesize/problems.parquet").to_pylist()
    assert {(row["split"], row["family"], row["verifier"]) for row in problems} == {
        ("train", "gsm8k", "numeric"),
        ("test", "gsm8k", "numeric"),
    }
    assert [row["split"] for row in problems].count("test") == 12
    demonstrations = pq.read_table(data / "synthesize/demonstrations.parquet").to_pylist()
    assert len(demonstrations) == 200
    for row in demonstrations:
        assert "<<" not in row["completion"] and "####" not in row["completion"]
        assert row["completion"].startswith("<think>Bob") and row["completion"].partition("</think>")[2].isdigit()
    metrics = json.loads((data / "evaluate/metrics.json").read_text())
    assert metrics["checkpoints"]["sft"]["accuracy"]["n"] == 12
    audited = project.ratchet("audit", "distill", "--json")
    assert "openai/gsm8k/main/train-00000-of-00001.parquet" in audited and "Qwen3-0.6B" in audited


def test_qwen3_4b_on_several_gpus(tmp_path):
    shapes = {"Qwen/Qwen3-4B": (64, 3), "Qwen/Qwen3-0.6B": (32, 1)}
    project = run(tmp_path, "real/qwen3-4b-gsm8k", TWO_PROCESSES, shapes=shapes)
    metrics = json.loads((project.root / "data/evaluate/metrics.json").read_text())
    assert list(metrics["checkpoints"]) == ["base", "sft", "rl@1", "rl@2", "student"]
    for stage in STAGES:
        assert project.outcome(stage)["exit_code"] == 0
    files = {path.name for path in (project.root / "data/rl/2").iterdir()}
    assert "model.safetensors" in files and not any("adapter" in name for name in files)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_vllm_that_is_not_installed_is_said_before_anything_runs(tmp_path):
    project = Project(tmp_path / "project")
    project.ratchet("recipe", "real/qwen3-0.6b-gsm8k")
    said = project.ratchet("run", code=2)
    assert "samples with vLLM, which is not installed here" in said and "started" not in said
