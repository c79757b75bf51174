"""From logits to tokens. Legend: B rows, V vocabulary."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pipelines.generation.settings import Sampling


def log_distribution(logits_B_V: Tensor, sampling: Sampling) -> Tensor:
    """Natural log-probs (B, V) in float32 of what is sampled from: temperature, then top-k, then top-p, renormalised.

    top_p keeps the likeliest tokens up to and including the one that reaches it (Holtzman et al. 2020, section 3.1).
    """
    logp_B_V = torch.log_softmax(logits_B_V.float() / sampling.temperature, dim=-1)
    if sampling.is_full_support:
        return logp_B_V
    ordered_B_V, order_B_V = logp_B_V.sort(dim=-1, descending=True, stable=True)
    dropped_B_V = torch.zeros_like(ordered_B_V, dtype=torch.bool)
    if sampling.top_k:
        dropped_B_V[:, sampling.top_k :] = True
        ordered_B_V = torch.log_softmax(ordered_B_V.masked_fill(dropped_B_V, -torch.inf), dim=-1)
    mass_before_B_V = ordered_B_V.exp().cumsum(dim=-1).roll(1, dims=-1)
    mass_before_B_V[:, 0] = 0.0
    dropped_B_V |= mass_before_B_V >= sampling.top_p if sampling.top_p < 1 else False
    dropped_B_V = torch.zeros_like(dropped_B_V).scatter(1, order_B_V, dropped_B_V)
    return torch.log_softmax(logp_B_V.masked_fill(dropped_B_V, -torch.inf), dim=-1)


def draw(logp_B_V: Tensor, uniforms_B: np.ndarray) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling: the token ids (B,) and their natural log-probs (B,).

    The token is the first whose cumulative probability exceeds the uniform; rounding at the top end falls back to the
    likeliest token.
    """
    cdf_B_V = logp_B_V.exp().cumsum(dim=-1)
    u_B = torch.from_numpy(uniforms_B.astype(np.float32)).to(logp_B_V.device)
    tokens_B = (cdf_B_V <= u_B[:, None]).sum(dim=-1)
    tokens_B = torch.where(tokens_B < logp_B_V.shape[-1], tokens_B, logp_B_V.argmax(dim=-1))
    return tokens_B, logp_B_V.gather(-1, tokens_B[:, None])[:, 0]


def measure(name: str, logp_B_V: Tensor) -> Tensor:
    """A measure of distributions, (B,), in nats: see `pipelines.generation.engine.Engine.generate`."""
    if name == "entropy":
        return -(logp_B_V.exp() * logp_B_V.clamp(min=torch.finfo(logp_B_V.dtype).min)).sum(dim=-1)
    if name == "self_certainty":
        return -math.log(logp_B_V.shape[-1]) - logp_B_V.mean(dim=-1)
    raise ValueError(f"there is no measure {name!r}")
