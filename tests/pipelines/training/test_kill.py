"""SIGKILL at every moment of a checkpoint's life: the rerun ends with the bytes of a run that was never killed.

Children are forked from this process, which has imported torch once, so that many kills stay cheap.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.distill.settings import DistillationParams
from pipelines.distill.train import distill
from pipelines.generation.settings import FullSupportSampling
from pipelines.reward.train import train_reward_model
from pipelines.sft.train import fine_tune
from pipelines.training import checkpoint
from pipelines.training.batch import Sequence
from pipelines.training.settings import Optimiser, TrainingParams

STEPS, EVERY = 6, 2
SETTINGS = Optimiser(lr=0.01, schedule="cosine", warmup_steps=1, weight_decay=0.1, clip_norm=1.0, micro_tokens=64)
TRAINING = {"steps": STEPS, "batch_size": 4, "optimiser": SETTINGS, "checkpoint_every": EVERY}
LOOP = {"pad_id": 0, "seed": 0}


def sequences(count: int) -> list[Sequence]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 12, count)
    return [Sequence(rng.integers(2, 32, n), {"supervised": np.ones(n, np.float32)}) for n in lengths]


def sft(make, scratch: Path, report) -> torch.nn.Module:
    model = make(0)
    fine_tune(model, sequences(10), TrainingParams(**TRAINING), scratch=scratch, report=report, **LOOP)
    return model


def reward(make, scratch: Path, report) -> torch.nn.Module:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForSequenceClassification

    config = make(0).config
    config.num_labels = 1
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(config)
    pool = sequences(20)
    pairs = list(zip(pool[::2], pool[1::2], strict=True))
    train_reward_model(model, pairs, TrainingParams(**TRAINING), scratch=scratch, report=report, **LOOP)
    return model


def rl(make, scratch: Path, report) -> torch.nn.Module:
    from pipelines.environments.verifiers import Verdict
    from pipelines.generation import rollouts
    from pipelines.rl.round import run_round
    from pipelines.rl.settings import Advantage, PolicyLoss, RewardWeights, RoundParams
    from tests.pipelines.rl.test_round import Letters, problems

    rollouts.verify_batch = lambda texts, *columns: [Verdict(t[:1] < "n", float(t[:1] < "n"), "letter") for t in texts]
    model = make(0)
    params = RoundParams(
        steps=STEPS,
        problems_per_step=4,
        group_size=4,
        updates_per_step=2,
        sampling=FullSupportSampling(temperature=1.0, max_new_tokens=4),
        loss=PolicyLoss(clip_low=0.2, clip_high=0.28, kl=0.1),
        advantage=Advantage(scale="none"),
        reward=RewardWeights(verifier=1.0, reward_model=0.0),
        optimiser=SETTINGS,
        checkpoint_every=EVERY,
    )
    _, table = run_round(
        model,
        Letters(),
        problems(),
        params,
        reward_model=None,
        reference=make(0),
        seed=0,
        stage="rl@1",
        scratch=scratch,
        report=report,
    )
    (scratch / "rollouts.json").write_text(repr(table.to_pylist()))
    return model


def student(make, scratch: Path, report) -> torch.nn.Module:
    model = make(0)
    params = DistillationParams(**TRAINING, cross_entropy=1.0, kl=1.0)
    distill(model, make(1), sequences(10), params, scratch=scratch, report=report, **LOOP)
    return model


STAGES: dict[str, Callable] = {"sft": sft, "reward": reward, "rl": rl, "distill": student}


def kill_between(step: int):
    def report(done, total, metrics):
        if done == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return report


def kill_at(moment: str):
    """Die inside the second checkpoint: while it is written, before or after its rename."""
    saves = 0
    rename, save_file = os.rename, checkpoint.save_file

    def die_when(name: str) -> None:
        if saves == 2 and name == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted_save(tensors, path):
        nonlocal saves
        if path.name == "model.safetensors":
            saves += 1
        save_file(tensors, path)
        die_when(f"after writing {path.name}")

    def watched_rename(source, target):
        die_when("before the rename")
        rename(source, target)
        die_when("after the rename")

    checkpoint.save_file, checkpoint.os.rename = counted_save, watched_rename
    return lambda done, total, metrics: None


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a child; returns its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def undisturbed():
    return lambda done, total, metrics: None


def result(stage: str, make, scratch: Path, arm: Callable[[], Callable] = undisturbed) -> Callable[[], None]:
    """The whole stage in `scratch`, its weights left there as bytes; `arm` sets the trap in the child."""

    def work() -> None:
        torch.set_num_threads(1)
        model = STAGES[stage](make, scratch, arm())
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        (scratch / "weights").write_bytes(weights)

    return work


BETWEEN = [f"between steps: {step}" for step in range(1, STEPS + 1)]
WITHIN = [
    "after writing model.safetensors",
    "after writing optimiser.safetensors",
    "before the rename",
    "after the rename",
]


@pytest.mark.parametrize("stage", STAGES)
def test_killed_anywhere_the_rerun_gives_the_same_bytes(stage, tiny_model, tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    assert forked(result(stage, tiny_model, whole)) == 0
    for number, moment in enumerate(BETWEEN + WITHIN):
        killed = tmp_path / str(number)
        killed.mkdir()
        step = int(moment.rpartition(" ")[2]) if moment in BETWEEN else 0
        arm = partial(kill_between, step) if step else partial(kill_at, moment)
        assert forked(result(stage, tiny_model, killed, arm)) == -signal.SIGKILL, moment
        assert forked(result(stage, tiny_model, killed)) == 0, moment
        for name in ("weights", *(("rollouts.json",) if stage == "rl" else ())):
            assert (killed / name).read_bytes() == (whole / name).read_bytes(), f"{name}, killed {moment}"
