"""What `torchrun` runs for test_team.py: one training run, its curve and its weights written by the first process."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from pipelines.training.batch import Sequence
from pipelines.training.checkpoint import CheckpointStore
from pipelines.training.components import TokenComponent, cross_entropy
from pipelines.training.loop import epochs, optimise
from pipelines.training.settings import Compute, Lora, Optimiser, Training
from pipelines.training.team import Dismissed, gather_team
from pipelines.training.trainer import Trainer
from tests.pipelines.tiny import tiny_qwen3

STEPS = 20


def units():
    rng = np.random.default_rng(0)
    return [(Sequence(rng.integers(2, 32, n), {"weight": np.ones(n, np.float32)}),) for n in rng.integers(3, 30, 21)]


def train(directory: Path, switches: str, stop_after: int = 0) -> None:
    optimiser = Optimiser(lr=0.01, schedule="cosine", warmup_steps=2, weight_decay=0.1, clip_norm=0.5)
    if "ema" in switches:
        optimiser = optimiser.model_copy(update={"ema": 0.9})
    lora = Lora(rank=2, alpha=4.0) if "lora" in switches else None
    layout = "packed" if "packed" in switches else "padded"
    params = Training(
        optimiser=optimiser, compute=Compute(micro_tokens=48, layout=layout), lora=lora, checkpoint_every=3
    )
    trained = tiny_qwen3()
    component = TokenComponent("cross_entropy", 1.0, "weight", cross_entropy)
    trainer = Trainer(trained, [component], params, STEPS, 0)

    def report(done, total, metrics):
        if done == stop_after:
            sys.exit(7)

    history = optimise(trainer, STEPS, epochs(units(), 5, 0), CheckpointStore(directory / "run"), 3, report)
    (directory / "history.json").write_text(json.dumps(history))
    trained.save_pretrained(directory / "model")


if __name__ == "__main__":
    torch.set_num_threads(1)
    gather_team()
    with suppress(Dismissed):
        train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
