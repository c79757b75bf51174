"""Two processes get the samples of one, whether each draws a share or the first one draws all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipelines.base.architectures import save_checkpoint
from pipelines.base.tokenizer import build_tokenizer
from pipelines.generation.native import NativeEngine
from tests.pipelines.generation.engines_of_two import PARAMS, drawn
from tests.pipelines.tiny import tiny_qwen3

REPOSITORY = Path(__file__).resolve().parents[3]


def test_both_processes_have_the_samples_of_one_and_only_the_first_opens_a_server(tmp_path, monkeypatch):
    tokenizer = build_tokenizer((), 128)
    save_checkpoint(tiny_qwen3(vocab_size=len(tokenizer)), tokenizer, tmp_path)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    module = ["-m", "tests.pipelines.generation.engines_of_two", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([*launcher, *module], env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path)])
    torch.set_num_threads(1)
    alone = json.loads(json.dumps(drawn(NativeEngine.open(tmp_path, PARAMS))))
    for rank in (0, 1):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert found["first"] == alone
        assert found["of nothing"] == []
        assert "make 132 tokens, the model has 128 positions" in found["too long"]
        tokens, measures, later_tokens, later_logprobs, version = found["shared"]
        assert (tokens, later_tokens, version) == (alone[0], alone[2], alone[4])
        figures, figures_alone = measures["entropy"] + later_logprobs, alone[1]["entropy"] + alone[3]
        for one, other in zip(figures, figures_alone, strict=True):
            assert one == pytest.approx(other, abs=1e-5)  # a batch of another shape rounds differently
    assert [path.name for path in tmp_path.glob("opened-by-*")] == ["opened-by-0"]
