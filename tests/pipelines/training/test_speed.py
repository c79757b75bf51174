from __future__ import annotations

import numpy as np
import pytest
import torch

from pipelines.training import speed, trainer
from pipelines.training.batch import Sequence
from pipelines.training.components import TokenComponent, cross_entropy
from pipelines.training.settings import Compute, Lora, Optimiser, Training
from pipelines.training.speed import Work
from pipelines.training.trainer import Trainer
from tests.pipelines.tiny import tiny_qwen3

LAYER = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32  # queries, keys and values, output, gated MLP
HEAD = 32 * 16


def sequence(*tokens: int) -> Sequence:
    return Sequence(np.array(tokens), {"weight": np.ones(len(tokens), np.float32)})


def made(**changes) -> Trainer:
    optimiser = Optimiser(lr=0.1, schedule="constant", warmup_steps=0, weight_decay=0.0, clip_norm=1.0)
    given = {"optimiser": optimiser, "compute": Compute(micro_tokens=64), "checkpoint_every": 1}
    component = TokenComponent("cross_entropy", 1.0, "weight", cross_entropy)
    return Trainer(tiny_qwen3(), [component], Training(**given | changes), 1, 0)


def test_the_work_of_a_model_is_that_of_the_formula():
    work = Work.of(tiny_qwen3())
    assert work.per_token == 6 * (2 * LAYER + HEAD)  # the embedding is the head too, and looks up for nothing
    assert work.per_pair == 12 * 2 * 2 * 8
    untied = Work.of(tiny_qwen3(tie_word_embeddings=False))
    assert untied.per_token == work.per_token


def test_frozen_weights_have_no_gradient_of_their_own():
    rank = 2
    adapted = Work.of(made(lora=Lora(rank=rank, alpha=1.0)).model)
    adapters = 2 * rank * (2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 32))
    assert adapted.per_token == 4 * (2 * LAYER + HEAD) + 6 * adapters


def test_a_common_beginning_counts_once_where_it_is_read_once():
    unit = (sequence(5, 6, 7, 8), sequence(5, 6, 9))
    work = Work(per_token=10.0, per_pair=1.0)
    assert work.flops([unit], "padded") == 10 * 7 + 16 + 9
    assert work.flops([unit], "shared") == 10 * 5 + 16 + 9 - 4


def test_a_mixture_of_experts_has_no_figure():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3MoeConfig(vocab_size=32, num_experts=2, moe_intermediate_size=8, intermediate_size=8, **shape)
    assert Work.of(Qwen3MoeForCausalLM(config)) is None


def test_rates_are_over_the_whole_step_and_utilisation_over_its_updates(monkeypatch):
    units = [(sequence(5, 6, 7, 8), sequence(5, 6, 9)), (sequence(5, 6),)]
    trained = made()
    assert trained.speed(units, 3.0, 1.5) == {"tokens_per_second": 3.0, "samples_per_second": 1.0}
    assert trained.speed([], 3.0, 1.5) == {}
    monkeypatch.setattr(trainer, "peak", lambda device: 1e6)
    flops = 6 * (2 * LAYER + HEAD) * 9 + 12 * 2 * 2 * 8 * (16 + 9 + 4)
    assert trained.speed(units, 3.0, 1.5)["model_flop_utilisation"] == pytest.approx(flops / 1.5 / 1e6)


def test_the_peak_of_a_gpu_is_that_of_its_name(monkeypatch):
    assert speed.peak(torch.device("cpu")) is None
    for name, peak in {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "Somebody's GPU": None}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert speed.peak(torch.device("cuda")) == peak
