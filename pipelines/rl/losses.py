"""Token losses of policy optimisation. Legend: N scored tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from pipelines.training.batch import MicroBatch
from pipelines.training.components import Outputs, TokenLoss


def clipped_policy_gradient(clip_low: float, clip_high: float) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) per token, r = exp(log p - log p of the behaviour policy).

    PPO (Schulman et al. 2017, eq. 7) per token as in GRPO (Shao et al. 2024, eq. 3), with the upper clip apart from the
    lower one (DAPO, Yu et al. 2025, eq. 10). Reads values "advantage" and "behaviour_logp".
    """

    def token_loss(outputs: Outputs, batch: MicroBatch) -> Tensor:
        ratio_N = torch.exp(outputs.logp_N - batch.values["behaviour_logp"])
        advantage_N = batch.values["advantage"]
        clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
        return -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)

    return token_loss


def kl_to_reference(outputs: Outputs, batch: MicroBatch) -> Tensor:
    """k3 estimate of KL(policy || reference) per sampled token: exp(d) - d - 1 with d = log ref - log p.

    Schulman 2020, "Approximating KL divergence"; never negative. Reads value "reference_logp".
    """
    difference_N = batch.values["reference_logp"] - outputs.logp_N
    return torch.exp(difference_N) - difference_N - 1.0


def clip_share(clip_low: float, clip_high: float) -> TokenLoss:
    """1 where the clip cuts the gradient of `clipped_policy_gradient`, 0 elsewhere."""

    def measure(outputs: Outputs, batch: MicroBatch) -> Tensor:
        ratio_N = torch.exp(outputs.logp_N - batch.values["behaviour_logp"])
        advantage_N = batch.values["advantage"]
        high_N = (ratio_N > 1.0 + clip_high) & (advantage_N > 0)
        low_N = (ratio_N < 1.0 - clip_low) & (advantage_N < 0)
        return (high_N | low_N).float()

    return measure


def behaviour_kl(outputs: Outputs, batch: MicroBatch) -> Tensor:
    """k3 estimate of KL(behaviour || policy) per token; on the first update of a batch it shows a differing sampler."""
    difference_N = outputs.logp_N - batch.values["behaviour_logp"]
    return torch.exp(difference_N) - difference_N - 1.0
