"""Log-probs of tokens from logits, without a second tensor of the vocabulary's size.

Written out, log-softmax and its gradient hold four float32 tensors of tokens x vocabulary at a time: with 8,192 tokens
and 152,000 words, 20 GB. Here forward and backward pass go over blocks of tokens; what remains is the logits themselves
and their gradient, in the number format of the logits. Legend: N tokens, V vocabulary, M tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = {"cpu": 2**18, "cuda": 2**26}  # numbers: what fits a CPU's cache, and what keeps a GPU busy


def token_logprobs(logits_N_V: Tensor, targets_N: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the targets, (N,), computed in float32 and differentiable once.

    d logp_n / d logits_nv = ([v is the target] - softmax_nv) / temperature.
    """
    return _TokenLogprobs.apply(logits_N_V, targets_N, temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_N_V: Tensor, targets_N: Tensor, temperature: float) -> Tensor:
        logp_N = torch.empty(len(logits_N_V), dtype=torch.float32, device=logits_N_V.device)
        normaliser_N = torch.empty_like(logp_N)
        for rows in _blocks(logits_N_V):
            scaled_M_V = _scaled(logits_N_V[rows], temperature)
            normaliser_N[rows] = scaled_M_V.logsumexp(dim=-1)
            logp_N[rows] = scaled_M_V.gather(-1, targets_N[rows, None])[:, 0] - normaliser_N[rows]
        ctx.save_for_backward(logits_N_V, targets_N, normaliser_N)
        ctx.temperature = temperature
        return logp_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, None, None]:
        logits_N_V, targets_N, normaliser_N = ctx.saved_tensors
        gradient_N_V = torch.empty_like(logits_N_V)
        weight_N_1 = gradient_N[:, None] / ctx.temperature
        for rows in _blocks(logits_N_V):
            scaled_M_V = _scaled(logits_N_V[rows], ctx.temperature)
            block_M_V = (scaled_M_V - normaliser_N[rows, None]).exp_().mul_(-weight_N_1[rows])
            block_M_V.scatter_add_(-1, targets_N[rows, None], weight_N_1[rows])
            gradient_N_V[rows] = block_M_V
        return gradient_N_V, None, None


def _scaled(logits_M_V: Tensor, temperature: float) -> Tensor:
    return logits_M_V.float() if temperature == 1.0 else logits_M_V.float() / temperature


def _blocks(logits_N_V: Tensor) -> Iterator[slice]:
    count, vocabulary = logits_N_V.shape
    size = max(1, _BLOCK.get(logits_N_V.device.type, _BLOCK["cpu"]) // vocabulary)
    return (slice(start, start + size) for start in range(0, count, size))
