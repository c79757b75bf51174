"""Asking a checkpoint questions: what cannot be asked or answered is said in one sentence."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from flows.generate import converse
from pipelines.base.architectures import load_tokenizer
from pipelines.base.checkpoint import materialise
from pipelines.base.settings import BaseParams
from pipelines.errors import UserError

SHAPE = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 32, "rope_theta": 1000.0}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with the checkpoint `model`, which has 16 positions."""
    source = {"kind": "initialise", "architecture": SHAPE | {"max_length": 16}}
    materialise(BaseParams(source=source), 0, tmp_path / "model")
    return tmp_path


def ask(root: Path, prompt: str | None, max_new_tokens: int | None = None) -> None:
    converse(root, "model", prompt, 1, 1.0, max_new_tokens, 0)


def type_in(monkeypatch: pytest.MonkeyPatch, content: bytes, errors: str = "strict") -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors=errors))


def test_every_line_of_input_is_answered(root, monkeypatch, capsys):
    type_in(monkeypatch, b"1 + 1?\n\n2 + 2?\n")
    ask(root, None, 2)
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_input_that_is_no_text_is_refused(root, monkeypatch, errors):
    type_in(monkeypatch, b"1 + \xff?\n", errors)
    with pytest.raises(UserError, match="standard input holds bytes that are no UTF-8 text"):
        ask(root, None)


def test_a_prompt_that_is_no_text_is_refused(root):
    with pytest.raises(UserError, match="the prompt holds bytes that are no UTF-8 text"):
        ask(root, "1 + \udcff?")


def test_a_question_that_leaves_no_position_for_the_answer_is_refused(root, capsys):
    ask(root, "1" * 13)
    with pytest.raises(UserError, match="the question has 16 tokens and model has 16 positions"):
        ask(root, "1" * 14, 3)


def test_a_question_without_tokens_is_refused(root):
    tokenizer = load_tokenizer(root / "model")
    tokenizer.chat_template = None
    (root / "model" / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(root / "model")
    with pytest.raises(UserError, match="the question has no tokens"):
        ask(root, "")


def test_damaged_weights_are_said_in_one_sentence(root):
    (root / "model" / "model.safetensors").write_bytes(b"junk" * 100)
    with pytest.raises(UserError, match=r"the model of .*model cannot be loaded: Error while deserializing"):
        ask(root, "1")
