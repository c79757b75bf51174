"""Bradley-Terry training of a reward model, and its accuracy on held-out pairs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import torch

from pipelines.rewards.model import RewardModel
from pipelines.training.batch import Sequence, Unit, indices_at
from pipelines.training.checkpoint import CheckpointStore
from pipelines.training.components import BradleyTerry, score_outputs
from pipelines.training.loop import Report, Trainer, optimise
from pipelines.training.settings import Optimiser


def pair_units(pairs: Seq[tuple[Seq[int], Seq[int]]]) -> list[Unit]:
    """(chosen tokens, rejected tokens) as units of two sequences."""
    return [(Sequence(np.asarray(chosen)), Sequence(np.asarray(rejected))) for chosen, rejected in pairs]


def train_reward_model(
    model: torch.nn.Module,
    units: Seq[Unit],
    *,
    steps: int,
    batch_size: int,
    optimiser: Optimiser,
    pad_id: int,
    seed: int,
    scratch: Path,
    checkpoint_every: int,
    report: Report,
) -> list[dict[str, float]]:
    """Train `model` (one label) in place on `batch_size` pairs a step; returns the metrics per step."""
    trainer = Trainer(model, [BradleyTerry()], optimiser, steps, pad_id, forward=score_outputs)

    def units_at(step: int):
        return [[units[index] for index in indices_at(step, batch_size, seed, len(units))]], {}

    return optimise(trainer, steps, units_at, CheckpointStore(scratch / "checkpoints"), checkpoint_every, report)


def pair_accuracy(model: torch.nn.Module, units: Seq[Unit], pad_id: int) -> float:
    """Share of pairs whose chosen sequence scores higher; a tie counts half."""
    scores = RewardModel(model, pad_id).scores([sequence.tokens for unit in units for sequence in unit])
    chosen_R, rejected_R = scores.reshape(-1, 2).T
    return float(np.mean((chosen_R > rejected_R) + 0.5 * (chosen_R == rejected_R)))
