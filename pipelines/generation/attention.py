"""Attention of one query per row, the case of decoding, as two batched matrix products without copying keys.

Legend: B rows, K key heads, G query heads per key head, T tokens, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

IMPLEMENTATION = "ratchet"
_UNUSUAL = ("position_bias", "softcap", "s_aux", "cache")


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What `transformers` calls: softmax(q k' scaling + mask) v of shape (B, 1, K x G, D); SDPA for anything else."""
    is_usual = dropout == 0.0 and all(kwargs.get(name) is None for name in _UNUSUAL)
    is_usual &= attention_mask is None or attention_mask.shape[1] == 1  # one mask for all heads
    if query.shape[2] != 1 or not is_usual:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    rows, heads, _, dimension = query.shape
    query_B_K_G_D = query.reshape(rows, key.shape[1], heads // key.shape[1], dimension)
    scores_B_K_G_T = torch.matmul(query_B_K_G_D * (scaling or dimension**-0.5), key.transpose(2, 3))
    if attention_mask is not None:
        mask = attention_mask
        scores_B_K_G_T = (
            scores_B_K_G_T.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores_B_K_G_T + mask
        )
    weights_B_K_G_T = torch.softmax(scores_B_K_G_T.float(), dim=-1).to(value.dtype)
    return torch.matmul(weights_B_K_G_T, value).reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
