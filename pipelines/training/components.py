"""Loss components: each a sum over its own token weights, divided by its own denominator over the whole step.

L = sum over components c of  coefficient_c * (sum over units of loss_c) / denominator_c.
The denominator is taken over every unit of the optimiser step before it is cut into micro-batches, so the gradient does
not depend on the split, the layout or the order. Legend: S sequences, N scored tokens, B rows, T columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from pipelines.training.batch import MicroBatch, Unit
from pipelines.training.logprobs import token_logprobs


@dataclass(frozen=True)
class Outputs:
    """What a forward pass gives the components: log-probs of the scored tokens, or one score per sequence."""

    logp_N: Tensor | None = None  # log p(token | the tokens before it)
    logits_N_V: Tensor | None = None  # of the whole distributions, at a temperature of 1
    scores_S: Tensor | None = None


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
    """A loss per scored token (N,), weighted by `values[weights]` and divided by their sum over the step.

    `measures` are weighted the same way and only logged.
    """

    name: str
    coefficient: float
    weights: str
    token_loss: TokenLoss
    measures: dict[str, TokenLoss] = field(default_factory=dict)

    def denominator(self, units: Sequence[Unit]) -> float:
        return float(sum(sequence.values[self.weights][1:].sum(dtype="float64") for unit in units for sequence in unit))

    def loss(self, outputs: Outputs, batch: MicroBatch) -> Tensor:
        return (batch.values[self.weights] * self.token_loss(outputs, batch)).sum()

    def measure(self, outputs: Outputs, batch: MicroBatch) -> dict[str, Tensor]:
        weights_N = batch.values[self.weights]
        return {name: (weights_N * measure(outputs, batch)).sum() for name, measure in self.measures.items()}


def cross_entropy(outputs: Outputs, batch: MicroBatch) -> Tensor:
    """-log p of the actual token, (N,)."""
    return -outputs.logp_N


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
        chosen_P, rejected_P = outputs.scores_S.view(-1, 2).unbind(dim=1)
        return -torch.nn.functional.logsigmoid(chosen_P - rejected_P).sum()

    def measure(self, outputs: Outputs, batch: MicroBatch) -> dict[str, Tensor]:
        chosen_P, rejected_P = outputs.scores_S.view(-1, 2).unbind(dim=1)
        return {"pair_accuracy": (chosen_P > rejected_P).sum()}


def token_outputs(model: torch.nn.Module, batch: MicroBatch, temperature: float = 1.0) -> Outputs:
    """Forward pass of a causal language model; log-probs in float32 whatever the model computes in.

    temperature: of the distribution, as that of `generation`'s Sampling. Logits are computed only where a token is
    scored, so a long prompt costs no vocabulary-sized tensor.
    """
    columns_K, place_N = torch.unique(batch.columns_N, return_inverse=True)
    logits_B_K_V = model(**model_inputs(batch), logits_to_keep=columns_K).logits
    logits_N_V = logits_B_K_V[batch.rows_N, place_N]
    return Outputs(logp_N=token_logprobs(logits_N_V, batch.targets_N, temperature), logits_N_V=logits_N_V)


def score_outputs(model: torch.nn.Module, batch: MicroBatch) -> Outputs:
    """Forward pass of a sequence classifier with one label: its score at the last token of each sequence."""
    hidden_B_T_D = model.base_model(**model_inputs(batch)).last_hidden_state
    return Outputs(scores_S=model.score(hidden_B_T_D[batch.ends_S]).float()[:, 0])


def model_inputs(batch: MicroBatch) -> dict[str, Any]:
    """The keyword arguments of a `transformers` model for a micro-batch."""
    inputs = {"input_ids": batch.tokens_B_T, "use_cache": False}
    if batch.positions_B_T is not None:
        inputs["position_ids"] = batch.positions_B_T
    if batch.mask_B_1_T_T is not None:
        inputs["attention_mask"] = batch.mask_B_1_T_T
    return inputs
