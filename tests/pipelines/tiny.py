"""A tiny language model for the tests of everything that computes with one."""

from __future__ import annotations

from typing import Any


def tiny_qwen3(seed: int = 0, **changes: Any) -> Any:
    """A fresh float32 Qwen3 of about 5,000 parameters with 32 tokens, pad 0, end 1; `changes` of its configuration."""
    import torch
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3ForCausalLM

    shape = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**shape | changes))
