"""Supervised fine-tuning: cross-entropy on the completion tokens of demonstrations, mean over all of them in a step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from pipelines.base.architectures import position_limit
from pipelines.base.tokenizer import encode_prompts
from pipelines.errors import UserError
from pipelines.training.batch import Sequence
from pipelines.training.checkpoint import CheckpointStore
from pipelines.training.components import TokenComponent, cross_entropy
from pipelines.training.loop import Report, epochs, optimise
from pipelines.training.settings import TrainingParams
from pipelines.training.trainer import Trainer


def encode_demonstrations(tokenizer, demonstrations: pa.Table, max_tokens: int) -> list[Sequence]:
    """Prompt + completion + end token of each row of records.DEMONSTRATION, weight 1 on what the model is to write.

    Raises UserError when a row is longer than `max_tokens`: cutting it would teach answers without an end.
    """
    if not demonstrations.num_rows:
        raise UserError("data/synthesize holds no demonstrations, so sft has nothing to learn from; see data/README.md")
    prompts = encode_prompts(tokenizer, demonstrations["prompt"].to_pylist())
    completions = tokenizer(demonstrations["completion"].to_pylist(), add_special_tokens=False)["input_ids"]
    sequences = [
        supervised_sequence(prompt, [*completion, tokenizer.eos_token_id])
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    longest = max(range(len(sequences)), key=lambda index: len(sequences[index].tokens))
    if len(sequences[longest].tokens) > max_tokens:
        raise UserError(
            f"demonstration {demonstrations['id'][longest].as_py()} has {len(sequences[longest].tokens)} tokens; "
            f"sft.max_tokens allows {max_tokens}: raise it or leave long demonstrations out"
        )
    return sequences


def supervised_sequence(prompt: Seq[int], completion: Seq[int]) -> Sequence:
    """One training sequence whose "supervised" weight is 0 on the prompt and 1 on the completion."""
    weights = np.concatenate([np.zeros(len(prompt), np.float32), np.ones(len(completion), np.float32)])
    return Sequence(np.array([*prompt, *completion], dtype=np.int64), {"supervised": weights})


def fine_tune(
    model: torch.nn.Module,
    sequences: Seq[Sequence],
    params: TrainingParams,
    *,
    pad_id: int,
    seed: int,
    scratch: Path,
    report: Report,
) -> list[dict[str, float]]:
    """Train `model` in place on `batch_size` sequences a step; returns the metrics per step.

    Raises UserError when a sequence is longer than the model has positions.
    """
    refuse_longer_than(position_limit(model), sequences, "demonstration", "data/base", "base.source")
    component = TokenComponent("cross_entropy", 1.0, "supervised", cross_entropy)
    trainer = Trainer(model, [component], params, params.steps, pad_id)
    batches = epochs([(sequence,) for sequence in sequences], params.batch_size, seed)
    store = CheckpointStore(scratch / "checkpoints")
    return optimise(trainer, params.steps, batches, store, params.checkpoint_every, report)


def refuse_longer_than(limit: int | None, sequences: Seq[Sequence], kind: str, model: str, key: str) -> None:
    """Raise UserError when a sequence has more tokens than a model has positions; key: where params.yaml has it."""
    longest = max(len(sequence.tokens) for sequence in sequences)
    if limit is not None and longest > limit:
        raise UserError(
            f"the longest {kind} has {longest} tokens, the model of {model} has {limit} positions; "
            f"raise {key}.architecture.max_length to {longest}, or name an imported model with more positions "
            f"in {key}.checkpoint"
        )
