"""Whether a foreign checkpoint can be a policy, found by trying it rather than by its names.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from pipelines.base.architectures import position_limit
from pipelines.base.tokenizer import encode_prompts
from pipelines.errors import UserError, failures_said_as

_QUESTIONS = ("1 + 2 = ?", "Name a colour.")
_TOLERANCE = 1e-4  # of the largest logit; rounding moves a causal model by less, a bidirectional one moves by more


def refuse_unfit(model: Any, tokenizer: Any, name: str) -> None:
    """Raise UserError unless `model` and `tokenizer`, called `name` in the message, can read questions and answer."""
    embedded = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > embedded:
        raise UserError(f"the tokenizer of {name} has {len(tokenizer)} tokens, its model only {embedded}")
    with failures_said_as(f"the tokenizer of {name} fails on a question"):
        question, other = encode_prompts(tokenizer, _QUESTIONS)
    if question == other:
        raise UserError(
            f"{name} turns two different questions into the same tokens; "
            "mend its chat template (chat_template) or its tokenizer"
        )
    with failures_said_as(f"the model of {name} fails on a question"):
        _refuse_looking_ahead(model, question, name)


def _refuse_looking_ahead(model: Any, tokens: list[int], name: str) -> None:
    """A causal model predicts the same after each of `tokens` whichever token follows them."""
    import torch

    limit = position_limit(model)
    if limit is not None and len(tokens) >= limit:
        raise UserError(f"{name} has {limit} positions, too few for a question of {len(tokens)} tokens and its answer")
    followed_2_T = torch.tensor([[*tokens, 0], [*tokens, 1]])
    with torch.inference_mode():
        one_T_V, two_T_V = model.eval()(input_ids=followed_2_T, attention_mask=torch.ones_like(followed_2_T)).logits
    moved = (one_T_V[:-1] - two_T_V[:-1]).abs().max()
    if moved.isnan():
        raise UserError(f"the model of {name} predicts NaN after a plain question; give an undamaged checkpoint")
    if moved > _TOLERANCE * one_T_V.abs().max():
        raise UserError(
            f"{name} is no causal language model: what its {type(model).__name__} predicts after a token "
            "depends on the tokens behind it; give a checkpoint that writes from left to right"
        )
