"""Asking a checkpoint questions, at the shell."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelines.base.architectures import policy_config
from pipelines.errors import UserError
from tasks.graph import load_graph

_LONGEST = 512


def converse(
    root: Path,
    checkpoint: str,
    prompt: str | None,
    samples: int,
    temperature: float,
    max_new_tokens: int | None,
    seed: int,
) -> None:
    """Print `samples` answers to the prompt, or to every line of standard input.

    max_new_tokens: None gives what the model has positions for after the prompt, at most 512.
    Raises UserError when `checkpoint` is no directory with a model and no stage that has published one, when it cannot
    be loaded, and when a question is no text or leaves no position for an answer.
    """
    directory = find_checkpoint(root, checkpoint)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers.utils import logging

    from pipelines.base.architectures import position_limit
    from pipelines.generation.engine import Prompt, sample_key
    from pipelines.generation.native import NativeEngine
    from pipelines.generation.settings import Sampling

    logging.disable_progress_bar()
    engine = NativeEngine.open(directory)
    tokenizer = engine.tokenizer
    limit = position_limit(engine.model)
    for question in _questions(prompt):
        keys = tuple(sample_key(seed, "generate", 0, question, sample) for sample in range(samples))
        tokens = _encode(tokenizer, question)
        room = _room(len(tokens), limit, checkpoint)
        sampling = Sampling(temperature=temperature, max_new_tokens=max_new_tokens or room)
        drawn = engine.generate([Prompt(tokens, keys)], sampling)
        for tokens, reason in zip(drawn.tokens, drawn.finish_reasons, strict=True):
            ended = reason == "stop"
            text = tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)
            print(text.strip() + ("" if ended else " [cut]"), flush=True)
    engine.close()


def find_checkpoint(root: Path, name: str) -> Path:
    """The directory of a checkpoint given as a path, or as the name of the stage that published it."""
    path = Path(name) if Path(name).is_absolute() else root / name
    if not path.exists() and (root / "dvc.yaml").is_file() and "/" not in name:
        graph = load_graph(root)
        stages = graph.resolve(name)
        if len(stages) > 1:
            raise UserError(f"`{name}` stands for several stages; name one of {', '.join(stages)}.")
        path = root / graph.nodes[stages[0]].outs[0]
        if not path.exists():
            raise UserError(f"{stages[0]} has not been built; run it with `ratchet run {stages[0]} --upstream`.")
    if not (path / "config.json").is_file() or not list(path.glob("*.safetensors")):
        raise UserError(f"{name} is no checkpoint: a directory with config.json and *.safetensors is needed.")
    policy_config(path)
    return path


def _encode(tokenizer: Any, question: str) -> list[int]:
    from pipelines.base.tokenizer import encode_prompts

    return encode_prompts(tokenizer, [question])[0]


def _room(tokens: int, limit: int | None, checkpoint: str) -> int:
    """How many tokens an answer to a question of `tokens` may have; `limit`: positions of the model."""
    if not tokens:
        raise UserError("the question has no tokens; ask something.")
    if limit is None:
        return _LONGEST
    if tokens >= limit:
        raise UserError(
            f"the question has {tokens} tokens and {checkpoint} has {limit} positions, which leaves none for an "
            "answer; ask a shorter one."
        )
    return min(_LONGEST, limit - tokens)


def _questions(prompt: str | None) -> Iterator[str]:
    source = "standard input" if prompt is None else "the prompt"
    try:
        for question in _lines() if prompt is None else [prompt]:
            question.encode()  # bytes that are no text may have been read as surrogates
            yield question
    except UnicodeError:
        raise UserError(f"{source} holds bytes that are no UTF-8 text; convert it, for example with iconv.") from None


def _lines() -> Iterator[str]:
    is_dialogue = sys.stdin.isatty()
    while True:
        if is_dialogue:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
