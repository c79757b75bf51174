"""SIGKILL at random moments of a training stage: the rerun ends with the bytes of a run that was never killed.

Children are forked from this process, which has imported torch once, so that many kills stay cheap.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from pipelines.distill.settings import DistillationParams
from pipelines.distill.train import distill
from pipelines.environments.verifiers import Verdict
from pipelines.generation import rollouts
from pipelines.generation.native import NativeEngine
from pipelines.generation.settings import FullSupportSampling
from pipelines.reward.train import train_reward_model
from pipelines.rl import round
from pipelines.rl.round import run_round
from pipelines.rl.settings import Advantage, PolicyLoss, RewardWeights, RoundParams
from pipelines.sft.train import fine_tune
from pipelines.training import checkpoint, trainer
from pipelines.training.batch import Sequence
from pipelines.training.settings import Compute, Optimiser, TrainingParams

STEPS, EVERY, MOMENTS = 6, 2, 20
SETTINGS = Optimiser(lr=0.01, schedule="cosine", warmup_steps=1, weight_decay=0.1, clip_norm=1.0)
TRAINING = {
    "steps": STEPS,
    "batch_size": 4,
    "optimiser": SETTINGS,
    "compute": Compute(micro_tokens=64),
    "checkpoint_every": EVERY,
}
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


def rl(make, scratch: Path, report, **changes) -> torch.nn.Module:
    from tests.pipelines.rl.test_round import Letters, problems

    rollouts.verify_batch = lambda texts, *columns: [Verdict(t[:1] < "n", float(t[:1] < "n"), "letter") for t in texts]
    model = make(0)
    settings = dict(
        steps=STEPS,
        problems_per_step=4,
        group_size=4,
        updates_per_step=2,
        sampling=FullSupportSampling(temperature=1.0, max_new_tokens=4),
        loss=PolicyLoss(clip_low=0.2, clip_high=0.28, kl=0.1),
        advantage=Advantage(scale="none"),
        reward=RewardWeights(verifier=1.0, reward_model=0.0),
        optimiser=SETTINGS,
        compute=Compute(micro_tokens=64, layout="shared"),
        checkpoint_every=EVERY,
    )
    _, table = run_round(
        model,
        Letters(),
        NativeEngine(model, Letters()),
        problems(),
        RoundParams(**settings | changes),
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


def kill_at(moment: int | None, counted: Path) -> None:
    """Die at event number `moment`: after an update, a file, a sync, on either side of a rename; None counts them."""
    events = 0

    def event() -> None:
        nonlocal events
        events += 1
        if events == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        if moment is None:
            counted.write_text(str(events))

    def followed(function: Callable, before: bool = False) -> Callable:
        def call(*arguments, **options):
            if before:
                event()
            found = function(*arguments, **options)
            event()
            return found

        return call

    trainer.Trainer.update = followed(trainer.Trainer.update)
    checkpoint.save_file = followed(checkpoint.save_file)
    checkpoint.save_arrays = followed(checkpoint.save_arrays)
    checkpoint.sync = followed(checkpoint.sync)
    os.rename = followed(os.rename, before=True)
    shutil.rmtree = followed(shutil.rmtree)
    pq.write_table = followed(pq.write_table)


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


def result(stage: str, make, scratch: Path, moment: int | None) -> Callable[[], None]:
    """The whole stage in `scratch`, its weights left there as bytes; killed at event `moment`, if it is one."""

    def work() -> None:
        torch.set_num_threads(1)
        kill_at(moment, scratch / "events")
        model = STAGES[stage](make, scratch, lambda done, total, metrics: None)
        weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
        (scratch / "weights").write_bytes(weights)

    return work


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_random_moments_the_rerun_gives_the_same_bytes(stage, tiny_model, tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    assert forked(result(stage, tiny_model, whole, None)) == 0
    events = int((whole / "events").read_text())
    assert events > MOMENTS
    for moment in sorted(np.random.default_rng(0).choice(events - 1, MOMENTS, replace=False) + 1):
        killed = tmp_path / str(moment)
        killed.mkdir()
        assert forked(result(stage, tiny_model, killed, int(moment))) == -signal.SIGKILL, moment
        assert forked(result(stage, tiny_model, killed, None)) == 0, moment
        for name in ("weights", *(("rollouts.json",) if stage == "rl" else ())):
            assert (killed / name).read_bytes() == (whole / name).read_bytes(), f"{name}, killed at event {moment}"


def test_a_run_goes_on_inside_a_reused_batch(tiny_model, tmp_path):
    """Three updates per batch of rollouts and a checkpoint after each: killed after the second, it samples no more."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for directory in (whole, killed):
        directory.mkdir()
    play = partial(rl, updates_per_step=3, checkpoint_every=1)

    def work(scratch: Path, updates: int | None) -> Callable[[], None]:
        def run() -> None:
            torch.set_num_threads(1)
            update, sample, done = trainer.Trainer.update, rollouts.sample_rollouts, []

            def counted(*arguments):
                if len(done) == updates:
                    os.kill(os.getpid(), signal.SIGKILL)
                done.append(1)
                return update(*arguments)

            def noted(*arguments, **options):
                with (scratch / "sampled").open("a") as file:
                    file.write(f"{options['step']}\n")
                return sample(*arguments, **options)

            trainer.Trainer.update, round.sample_rollouts = counted, noted
            model = play(tiny_model, scratch, lambda done, total, metrics: None)
            (scratch / "weights").write_bytes(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))

        return run

    assert forked(work(whole, None)) == 0
    assert forked(work(killed, 2)) == -signal.SIGKILL
    assert list((killed / "checkpoints").glob("tick-00000002/batch.safetensors"))
    assert forked(work(killed, None)) == 0
    for name in ("weights", "rollouts.json", "sampled"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
