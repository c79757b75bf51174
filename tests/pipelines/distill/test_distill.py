"""The distillation loss against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipelines.distill.settings import DistillationParams
from pipelines.distill.train import distill, kl_from_teacher, verified_sequences
from pipelines.errors import UserError
from pipelines.training.batch import Sequence, micro_batches
from pipelines.training.components import token_outputs
from pipelines.training.settings import Compute, Optimiser
from tests.pipelines.tiny import tiny_qwen3


def batch():
    sequences = [(Sequence(np.array([3, 4, 5, 6]), {"supervised": np.ones(4, np.float32)}),)]
    (batch,) = micro_batches(sequences, "padded", 64, 0, torch.device("cpu"))
    return batch


def test_kl_to_an_equal_teacher_is_zero(tiny_model):
    student = tiny_model(0)
    loss = kl_from_teacher(tiny_model(0))(token_outputs(student, batch()), batch())
    assert torch.all(loss.abs() < 1e-6)


def test_kl_is_the_sum_over_the_vocabulary_and_reaches_the_student_only(tiny_model):
    student, teacher = tiny_model(0), tiny_model(1)
    loss = kl_from_teacher(teacher)(token_outputs(student, batch()), batch())
    p = torch.softmax(teacher(batch().tokens_B_T).logits[0, 1], -1)
    q = torch.softmax(student(batch().tokens_B_T).logits[0, 1], -1)
    assert float(loss[1].detach()) == pytest.approx(float((p * (p / q).log()).sum().detach()), abs=1e-5)
    loss.sum().backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert any(parameter.grad.abs().sum() > 0 for parameter in student.parameters())


def rollout(correct: bool, finish: str):
    return {"tokens": [5, 6, 7, 1], "prompt_tokens": 2, "correct": correct, "finish_reason": finish}


def test_samples_that_are_too_long_for_the_student_are_refused(tiny_model, tmp_path):
    optimiser = Optimiser(lr=0.1, schedule="constant", warmup_steps=0, weight_decay=0.0, clip_norm=1.0)
    loop = {"steps": 1, "batch_size": 1, "checkpoint_every": 1}
    params = DistillationParams(
        optimiser=optimiser, compute=Compute(micro_tokens=64), cross_entropy=1.0, kl=0.0, **loop
    )
    sequences = [Sequence(np.arange(3, 12), {"supervised": np.ones(9, np.float32)})]
    student = tiny_qwen3(max_position_embeddings=8)
    with pytest.raises(
        UserError, match=r"sample has 9 tokens, the model of the student has 8 positions; raise distill"
    ):
        distill(student, tiny_model(), sequences, params, pad_id=0, seed=0, scratch=tmp_path, report=print)


def test_only_right_and_finished_samples_are_learned_from():
    sequences = verified_sequences([rollout(True, "stop"), rollout(False, "stop"), rollout(True, "length")])
    assert [sequence.values["supervised"].tolist() for sequence in sequences] == [[0, 0, 1, 1]]
    with pytest.raises(UserError, match="no right answer"):
        verified_sequences([rollout(False, "stop")])
