"""What SFT learns from: the completion and its end, never the prompt, never a cut demonstration."""

from __future__ import annotations

import pytest

from pipelines.base.tokenizer import build_tokenizer, encode_prompts
from pipelines.errors import UserError
from pipelines.records import DEMONSTRATION, table
from pipelines.sft.train import encode_demonstrations


def demonstrations(*pairs: tuple[str, str]):
    keys = {"parents": [], "problem_id": "p", "family": "f", "level": 1, "mode": "steps"}
    rows = [keys | {"id": f"d{i}", "prompt": question, "completion": work} for i, (question, work) in enumerate(pairs)]
    return table(rows, DEMONSTRATION)


def test_weights_cover_the_completion_and_the_end_token_only():
    tokenizer = build_tokenizer(("two and ",), 64)
    (sequence,) = encode_demonstrations(tokenizer, demonstrations(("two and 3?", "<think></think>5")), 64)
    weights = sequence.values["supervised"]
    learned = sequence.tokens[weights == 1].tolist()
    assert tokenizer.decode(learned) == "<think></think>5<|end|>"
    assert tokenizer.decode(sequence.tokens[weights == 0].tolist()) == "<|user|>two and 3?<|assistant|>"


def test_a_demonstration_that_is_too_long_is_refused_by_name():
    tokenizer = build_tokenizer((), 64)
    with pytest.raises(UserError, match=r"demonstration d1 has \d+ tokens; sft.max_tokens allows 10"):
        encode_demonstrations(tokenizer, demonstrations(("1", "2"), ("1", "2" * 30)), 10)


def test_no_demonstrations_is_an_error():
    with pytest.raises(UserError, match="no demonstrations"):
        encode_demonstrations(build_tokenizer((), 64), demonstrations(), 10)


def test_without_a_chat_template_the_prompt_is_plain_text():
    tokenizer = build_tokenizer((), 64)
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_prompts(tokenizer, ["1+1"])[0]) == "1+1"
