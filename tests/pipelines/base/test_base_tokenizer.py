from __future__ import annotations

import pytest

from pipelines.base.tokenizer import build_tokenizer, pieces
from pipelines.environments.families import FAMILIES, lexicon
from pipelines.environments.family import demonstrate


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(lexicon(), 128)


@pytest.mark.parametrize(
    "text",
    ["", "007", "héllo 日本 🙂", "a\x00\r\n\t b", "<0x41>", "  two  spaces ", " zerofour", "\u0301", "ﬁ", "x" * 5000],
)
def test_any_text_comes_back_as_it_was(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_tokens_of_their_own(tokenizer):
    assert tokenizer.tokenize("4820917") == list("4820917")


@pytest.mark.parametrize("name", FAMILIES)
def test_problems_need_no_bytes_and_few_tokens(tokenizer, name):
    for level in FAMILIES[name].levels:
        problem = FAMILIES[name].generate(level, 0, 0)
        tokens = tokenizer.tokenize(problem.prompt + demonstrate(problem, "steps"))
        assert len(tokens) <= 48
        assert not [token for token in tokens if token.startswith("<0x")]


def test_control_tokens_are_single_and_the_chat_template_places_them(tokenizer):
    chat = [{"role": "user", "content": "7?"}, {"role": "assistant", "content": "<think></think>7"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert text == "<|user|>7?<|assistant|><think></think>7<|end|>"
    assert tokenizer.tokenize(text) == ["<|user|>", "7", "?", "<|assistant|>", "<think>", "</think>", "7", "<|end|>"]
    asked = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert text.startswith(asked)
    assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token == "<|pad|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == "7?<think></think>7"


def test_saved_twice_it_is_the_same_and_auto_tokenizer_reads_it(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    for name in ("one", "two"):
        build_tokenizer(lexicon(), 128).save_pretrained(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert [(tmp_path / "one" / f).read_bytes() for f in files] == [(tmp_path / "two" / f).read_bytes() for f in files]
    loaded = AutoTokenizer.from_pretrained(tmp_path / "one")
    text = "<|user|>The ball is under cup A?<|assistant|><think> zero"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template


def test_a_lexicon_piece_with_a_digit_is_refused():
    with pytest.raises(ValueError, match="'no7'"):
        pieces(("no7",))
