"""Loss components: each a sum over its own token weights, divided by its own denominator over the whole step.

L = sum over components c of  coefficient_c * (sum over units of loss_c) / denominator_c.
The denominator is taken over every unit of the optimiser step before it is cut into micro-batches, so the gradient does
not depend on the split, the padding or the order. Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from pipelines.training.batch import MicroBatch, Unit


@dataclass(frozen=True)
class Outputs:
    """What a forward pass gives the components: log-probs of the tokens, or one score per sequence."""

    logp_B_T: Tensor | None = None  # log p(token t | tokens < t); 0 at t = 0
    logprobs_B_T_V: Tensor | None = None  # whole distributions, aligned the same way
    scores_B: Tensor | None = None


class Component(Protocol):
    """One term of the loss. `loss` is the weighted sum over the micro-batch, not divided; so is what `measure` logs."""

    name: str
    coefficient: float

    def denominator(self, units: Sequence[Unit]) -> float: ...

    def loss(self, outputs: Outputs, batch: MicroBatch) -> Tensor: ...

    def measure(self, outputs: Outputs, batch: MicroBatch) -> dict[str, Tensor]: ...


TokenLoss = Callable[[Outputs, MicroBatch], Tensor]


@dataclass(frozen=True)
class TokenComponent:
    """A loss per token (B, T), weighted by `values[weights]` and divided by the sum of those weights over the step.

    `measures` are weighted the same way and only logged.
    """

    name: str
    coefficient: float
    weights: str
    token_loss: TokenLoss
    measures: dict[str, TokenLoss] = field(default_factory=dict)

    def denominator(self, units: Sequence[Unit]) -> float:
        return float(sum(sequence.values[self.weights].sum(dtype="float64") for unit in units for sequence in unit))

    def loss(self, outputs: Outputs, batch: MicroBatch) -> Tensor:
        return (batch.values[self.weights] * self.token_loss(outputs, batch)).sum()

    def measure(self, outputs: Outputs, batch: MicroBatch) -> dict[str, Tensor]:
        weights_B_T = batch.values[self.weights]
        return {name: (weights_B_T * measure(outputs, batch)).sum() for name, measure in self.measures.items()}


def cross_entropy(outputs: Outputs, batch: MicroBatch) -> Tensor:
    """-log p of the actual token, (B, T)."""
    return -outputs.logp_B_T


@dataclass(frozen=True)
class BradleyTerry:
    """-log sigmoid(score of chosen - score of rejected), mean over pairs (Ouyang et al. 2022, eq. 1).

    Units are (chosen, rejected), so scores alternate.
    """

    name: str = "bradley_terry"
    coefficient: float = 1.0

    def denominator(self, units: Sequence[Unit]) -> float:
        return float(len(units))

    def loss(self, outputs: Outputs, batch: MicroBatch) -> Tensor:
        chosen_B, rejected_B = outputs.scores_B.view(-1, 2).unbind(dim=1)
        return -torch.nn.functional.logsigmoid(chosen_B - rejected_B).sum()

    def measure(self, outputs: Outputs, batch: MicroBatch) -> dict[str, Tensor]:
        chosen_B, rejected_B = outputs.scores_B.view(-1, 2).unbind(dim=1)
        return {"pair_accuracy": (chosen_B > rejected_B).sum()}


def token_outputs(model: torch.nn.Module, batch: MicroBatch) -> Outputs:
    """Forward pass of a causal language model; log-probs in float32 whatever the model computes in."""
    logits_B_T_V = model(input_ids=batch.tokens_B_T, use_cache=False).logits[:, :-1].float()
    logprobs_B_T_V = torch.nn.functional.pad(torch.log_softmax(logits_B_T_V, dim=-1), (0, 0, 1, 0))
    logp_B_T = logprobs_B_T_V.gather(-1, batch.tokens_B_T[..., None])[..., 0]
    return Outputs(logp_B_T=logp_B_T, logprobs_B_T_V=logprobs_B_T_V)


def score_outputs(model: torch.nn.Module, batch: MicroBatch) -> Outputs:
    """Forward pass of a sequence classifier with one label: its score of the last real token."""
    hidden_B_T_D = model.base_model(input_ids=batch.tokens_B_T, use_cache=False).last_hidden_state
    last_B_D = hidden_B_T_D[torch.arange(len(batch.lengths_B), device=hidden_B_T_D.device), batch.lengths_B - 1]
    return Outputs(scores_B=model.score(last_B_D).float()[:, 0])
