"""Whether a model reads a row of several sequences as it reads each of them alone, found by trying it.

Legend: N tokens, D width of the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelines.base.architectures import attention_kinds
from pipelines.errors import UserError, failures_said_as
from pipelines.training.batch import Layout, Sequence, Unit, micro_batches
from pipelines.training.components import model_inputs

_TOLERANCE = 1e-3  # of the largest number; another rounding moves them by less, another sequence by more
_FITTING = {"packed": {"full_attention", "sliding_attention"}, "shared": {"full_attention"}}


def refuse_misread(model: Any, layout: Layout) -> None:
    """Raise UserError when the model's layers would see more or less of a row in `layout` than its sequences have.

    A window over the last tokens shows in long sequences only, so `shared`, in which a sequence is scattered, asks for
    layers that say they have none.
    """
    if layout == "padded":
        return
    refusal = f"compute.layout: {layout} does not fit a {type(model).__name__}"
    if others := attention_kinds(model) - _FITTING[layout]:
        raise UserError(f"{refusal} with {', '.join(sorted(others))}; use padded")
    with failures_said_as(f"{refusal}; use padded"):
        alone_D, together_D = _fingerprint(model, "padded"), _fingerprint(model, layout)
    if not (alone_D - together_D).abs().max() <= _TOLERANCE * alone_D.abs().max():
        raise UserError(f"{refusal}, which reads a sequence differently when others are in its row; use padded")


@torch.no_grad()
def _fingerprint(model: Any, layout: Layout) -> Tensor:
    """A weighted sum of what the model's last layer says of the tokens of two units, (D,)."""
    device = next(model.parameters()).device
    total_D = torch.zeros((), device=device)
    was_training = model.training
    model.eval()
    for batch in micro_batches(_units(model), layout, 256, 0, device):
        hidden_B_T_D = model.base_model(**model_inputs(batch)).last_hidden_state
        weights_N_1 = batch.values["weight"][:, None]
        total_D = total_D + (weights_N_1 * hidden_B_T_D[batch.rows_N, batch.columns_N].float()).sum(dim=0)
    model.train(was_training)
    return total_D


def _units(model: Any) -> list[Unit]:
    """Two units of two sequences, which begin alike and end differently, in the first tokens of the vocabulary."""
    known = min(64, model.get_input_embeddings().num_embeddings)
    random = np.random.default_rng(0)

    def unit(length: int) -> Unit:
        start = random.integers(0, known, 2)
        ends = [np.concatenate([[number % known], random.integers(0, known, length + number)]) for number in (1, 2)]
        tokens = [np.concatenate([start, end]) for end in ends]
        return tuple(Sequence(each, {"weight": random.normal(size=len(each)).astype(np.float32)}) for each in tokens)

    return [unit(1), unit(3)]
