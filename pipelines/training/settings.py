"""Parameters of the optimiser loop, shared by every stage that trains. Light at import: no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelines.settings import Strict


class Optimiser(Strict):
    """AdamW with a warm-up and a schedule."""

    lr: float = Field(gt=0, le=1, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        description="shape after the warm-up; linear and cosine end at 0"
    )
    warmup_steps: int = Field(ge=0, description="optimiser steps over which the learning rate rises from 0")
    weight_decay: float = Field(ge=0, le=1, description="decoupled weight decay, on matrices only")
    clip_norm: float = Field(gt=0, description="largest norm of the whole gradient; larger ones are scaled down")
    ema: float | None = Field(
        default=None, gt=0, lt=1, description="decay of a moving average of the weights, which is then published"
    )


class Compute(Strict):
    """How the forward and backward passes are carried out. Speed and memory; of the results only the last digits."""

    micro_tokens: int = Field(ge=16, description="tokens of one forward pass, padding included")
    layout: Literal["padded", "packed", "shared"] = Field(
        default="padded",
        description="a row per sequence | several behind one another | one per unit, its common beginning once",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the passes; weights and optimiser state are float32"
    )
    checkpointing: bool = Field(default=False, description="keep no activations of a layer, compute them again")
    compile: bool = Field(default=False, description="compile the model's layers with torch.compile")


class Lora(Strict):
    """Low-rank adapters (Hu et al. 2022) on every linear layer but the head, merged into the weights in the end."""

    rank: int = Field(ge=1, le=4096, description="rank of the update of each matrix")
    alpha: float = Field(gt=0, description="the update is scaled by alpha / rank")


class Training(Strict):
    """What every stage that trains has in its section."""

    optimiser: Optimiser
    compute: Compute
    lora: Lora | None = Field(default=None, description="train low-rank adapters; null trains all weights")
    checkpoint_every: int = Field(ge=1, description="steps between two checkpoints of a run that may be killed")


class TrainingParams(Training):
    """What a stage that trains on a fixed set of sequences needs; its parameter section adds its own keys."""

    steps: int = Field(ge=1, description="optimiser steps")
    batch_size: int = Field(ge=1, description="demonstrations, pairs or samples per step")
