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

STEPS = 20


def model():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


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
    trained = model()
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
