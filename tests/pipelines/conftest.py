"""Fixtures of everything that computes with a language model."""

from __future__ import annotations

import pytest

from tests.pipelines.tiny import tiny_qwen3


@pytest.fixture
def tiny_model():
    """`tiny_qwen3`, on one thread."""
    import torch

    torch.set_num_threads(1)
    return tiny_qwen3
