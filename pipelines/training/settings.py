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
    micro_tokens: int = Field(
        ge=16, description="padded tokens of one forward pass; changes speed and memory, not the result"
    )


class TrainingParams(Strict):
    """What every stage that trains on a fixed set of sequences needs; its parameter section adds its own keys."""

    steps: int = Field(ge=1, description="optimiser steps")
    batch_size: int = Field(ge=1, description="demonstrations, pairs or samples per step")
    optimiser: Optimiser
    checkpoint_every: int = Field(ge=1, description="steps between two checkpoints of a run that may be killed")
