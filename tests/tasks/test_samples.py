"""Samples of a stage that was killed behind them are read back, unless they are damaged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.base.architectures import save_checkpoint
from pipelines.base.tokenizer import build_tokenizer
from pipelines.generation import engines
from pipelines.generation.settings import NativeEngineParams, Sampling
from pipelines.records import PROBLEM, problem_id, table
from tasks.samples import verified_samples
from tests.pipelines.tiny import tiny_qwen3


@pytest.fixture
def stage(tmp_path):
    tokenizer = build_tokenizer((), 128)
    save_checkpoint(tiny_qwen3(vocab_size=len(tokenizer)), tokenizer, tmp_path / "model")
    (tmp_path / "scratch").mkdir()
    return SimpleNamespace(
        name="reward",
        seed=0,
        scratch=tmp_path / "scratch",
        engine=NativeEngineParams(name="native"),
        params=SimpleNamespace(samples=2, sampling=Sampling(temperature=1.0, max_new_tokens=4)),
        progress=lambda *arguments: None,
    )


def problems():
    rows = [
        {
            "id": problem_id(prompt, "2", "numeric"),
            "parents": [],
            "family": "sums",
            "level": 1,
            "split": "train",
            "prompt": prompt,
            "answer": "2",
            "verifier": "numeric",
            "verifier_args": "{}",
            "source": "file:a.jsonl#1",
        }
        for prompt in ("1+1?", "0+2?")
    ]
    return table(rows, PROBLEM)


@pytest.mark.parametrize("damage", ["none", "cut", "changed", "no digest"])
def test_what_was_drawn_is_read_back_if_it_is_whole(stage, monkeypatch, damage):
    checkpoint = stage.scratch.parent / "model"
    first = verified_samples(stage, checkpoint, problems())
    opened = []
    monkeypatch.setattr(engines, "open_engine", lambda *arguments: opened.append(1) or OPEN(*arguments))
    drawn: Path = stage.scratch / "samples.parquet"
    content = drawn.read_bytes()
    if damage == "cut":
        drawn.write_bytes(content[:-9])
    elif damage == "changed":
        drawn.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    elif damage == "no digest":
        (stage.scratch / "samples.sha256").unlink()
    assert verified_samples(stage, checkpoint, problems()).equals(first)
    assert len(opened) == (damage != "none")
    assert drawn.read_bytes() == content


OPEN = engines.open_engine
