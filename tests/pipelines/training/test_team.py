"""Two processes that train one model give the curve and the checkpoint of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelines.training.team import Team
from tests.pipelines.training.team_of_two import STEPS, train

REPOSITORY = Path(__file__).resolve().parents[3]


def together(directory: Path, switches: str, stop_after: int = 0) -> int:
    """Run two processes; returns the exit code of `torchrun`."""
    directory.mkdir(exist_ok=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    module = ["-m", "tests.pipelines.training.team_of_two", str(directory), switches, str(stop_after)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([*launcher, *module], env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert stop_after or done.returncode == 0, done.stderr[-3000:]
    return done.returncode


def alone(directory: Path, switches: str) -> None:
    directory.mkdir()
    torch.set_num_threads(1)
    train(directory, switches)


def curve(directory: Path) -> list[float]:
    return [step["loss/cross_entropy"] for step in json.loads((directory / "history.json").read_text())]


@pytest.mark.parametrize("switches", ["plain", "ema lora packed"])
def test_two_processes_have_the_curve_and_the_checkpoint_of_one(tmp_path, switches):
    together(tmp_path / "two", switches)
    alone(tmp_path / "one", switches)
    two, one = curve(tmp_path / "two"), curve(tmp_path / "one")
    assert len(two) == STEPS
    assert max(abs(a - b) for a, b in zip(two, one, strict=True)) < 1e-5
    assert one[-1] < one[0]
    files = [sorted(path.name for path in (tmp_path / name / "model").iterdir()) for name in ("two", "one")]
    assert files[0] == files[1]
    weights = [load_file(tmp_path / name / "model/model.safetensors") for name in ("two", "one")]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=0, atol=2e-4)


def test_two_processes_resume_to_the_same_bytes_and_one_can_go_on_for_them(tmp_path):
    together(tmp_path / "whole", "plain")
    assert together(tmp_path / "stopped", "plain", stop_after=8) != 0
    checkpoints = tmp_path / "stopped/run"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["tick-00000003", "tick-00000006"]
    (tmp_path / "single").mkdir()
    subprocess.run(["cp", "-r", checkpoints, tmp_path / "single/run"], check=True)
    together(tmp_path / "stopped", "plain")
    for name in ("history.json", "model/model.safetensors"):
        assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    torch.set_num_threads(1)
    train(tmp_path / "single", "plain")
    assert max(abs(a - b) for a, b in zip(curve(tmp_path / "single"), curve(tmp_path / "whole"), strict=True)) < 1e-5


def test_work_is_dealt_out_evenly_and_completely():
    sizes = [5, 1, 9, 3, 3, 8, 2]
    parts = []
    for rank in range(3):
        team = Team()
        team.rank, team.size = rank, 3
        parts.append(team.share(sizes, lambda size: size))
    assert sorted(size for part in parts for size in part) == sorted(sizes)
    assert [sum(part) for part in parts] == [9 + 3 + 1, 8 + 3, 5 + 2]
