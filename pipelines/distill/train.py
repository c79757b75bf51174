"""Distillation on the teacher's verified samples: cross-entropy plus per-token KL to the teacher.

Sequence-level distillation (Kim and Rush 2016) on samples a verifier accepted, with the word-level term
KL(teacher || student) over the whole vocabulary at every completion token (Hinton et al. 2015).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.base.architectures import position_limit
from pipelines.distill.settings import DistillationParams
from pipelines.errors import UserError
from pipelines.sft.train import refuse_longer_than, supervised_sequence
from pipelines.training.batch import MicroBatch, Sequence
from pipelines.training.checkpoint import CheckpointStore
from pipelines.training.components import Outputs, TokenComponent, TokenLoss, cross_entropy, token_outputs
from pipelines.training.loop import Report, epochs, optimise
from pipelines.training.trainer import Trainer


def verified_sequences(rollouts: Seq[dict[str, Any]]) -> list[Sequence]:
    """The rollouts the verifier accepted, finished ones only, as supervised sequences."""
    sequences = [
        supervised_sequence(row["tokens"][: row["prompt_tokens"]], row["tokens"][row["prompt_tokens"] :])
        for row in rollouts
        if row["correct"] and row["finish_reason"] == "stop"
    ]
    if not sequences:
        raise UserError(
            "distill: the teacher gave no right answer, so there is nothing to learn from; look at data/evaluate"
        )
    return sequences


def kl_from_teacher(teacher: torch.nn.Module) -> TokenLoss:
    """KL(teacher || student) of the next-token distribution per position, (N,), natural log."""

    def token_loss(outputs: Outputs, batch: MicroBatch) -> Tensor:
        with torch.no_grad():
            teacher_N_V = token_outputs(teacher, batch).logits_N_V.float().log_softmax(dim=-1)
        student_N_V = outputs.logits_N_V.float().log_softmax(dim=-1)
        return (teacher_N_V.exp() * (teacher_N_V - student_N_V)).sum(dim=-1)

    return token_loss


def distill(
    student: torch.nn.Module,
    teacher: torch.nn.Module,
    sequences: Seq[Sequence],
    params: DistillationParams,
    *,
    pad_id: int,
    seed: int,
    scratch: Path,
    report: Report,
) -> list[dict[str, float]]:
    """Train `student` in place; returns the metrics per step.

    Raises UserError when a sequence is longer than the student has positions.
    """
    refuse_longer_than(position_limit(student), sequences, "sample", "the student", "distill.student")
    components = [
        TokenComponent("cross_entropy", params.cross_entropy, "supervised", cross_entropy),
        TokenComponent("kl_from_teacher", params.kl, "supervised", kl_from_teacher(teacher.eval())),
    ]
    chosen = [component for component in components if component.coefficient > 0]
    trainer = Trainer(student, chosen, params, params.steps, pad_id)
    batches = epochs([(sequence,) for sequence in sequences], params.batch_size, seed)
    store = CheckpointStore(scratch / "checkpoints")
    return optimise(trainer, params.steps, batches, store, params.checkpoint_every, report)
