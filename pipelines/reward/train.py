"""Bradley-Terry training of a reward model, and its accuracy on held-out pairs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import torch

from pipelines.rewards.model import RewardModel
from pipelines.training.batch import Sequence, Unit
from pipelines.training.checkpoint import CheckpointStore
from pipelines.training.components import BradleyTerry, score_outputs
from pipelines.training.loop import Report, epochs, optimise
from pipelines.training.settings import TrainingParams
from pipelines.training.trainer import Trainer


def pair_units(pairs: Seq[tuple[Seq[int], Seq[int]]]) -> list[Unit]:
    """(chosen tokens, rejected tokens) as units of two sequences."""
    return [(Sequence(np.asarray(chosen)), Sequence(np.asarray(rejected))) for chosen, rejected in pairs]


def train_reward_model(
    model: torch.nn.Module,
    units: Seq[Unit],
    params: TrainingParams,
    *,
    pad_id: int,
    seed: int,
    scratch: Path,
    report: Report,
) -> list[dict[str, float]]:
    """Train `model` (one label) in place on `batch_size` pairs a step; returns the metrics per step."""
    trainer = Trainer(model, [BradleyTerry()], params, params.steps, pad_id, forward=score_outputs)
    batches, store = epochs(units, params.batch_size, seed), CheckpointStore(scratch / "checkpoints")
    return optimise(trainer, params.steps, batches, store, params.checkpoint_every, report)


def pair_accuracy(model: torch.nn.Module, units: Seq[Unit], pad_id: int) -> float:
    """Share of pairs whose chosen sequence scores higher; a tie counts half."""
    scores = RewardModel(model, pad_id).scores([sequence.tokens for unit in units for sequence in unit])
    chosen_R, rejected_R = scores.reshape(-1, 2).T
    return float(np.mean((chosen_R > rejected_R) + 0.5 * (chosen_R == rejected_R)))
