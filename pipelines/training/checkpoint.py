"""Resumable training state on disk: safetensors and JSON, atomic, verified before the older one goes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pipelines.training.trainer import Trainer

_NAME = re.compile(r"step-(\d{8})")


class CheckpointStore:
    """The checkpoints of one training stage in one directory; keeps the newest `keep` that can be read."""

    def __init__(self, directory: Path, keep: int = 2):
        self.directory, self.keep = directory, keep
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".writing-*"):
            shutil.rmtree(leftover)

    def save(self, trainer: Trainer, history: list[dict[str, float]]) -> Path:
        """Write model, optimiser, update count and history; then drop all but the newest `keep`."""
        final = self.directory / f"step-{len(history):08d}"
        writing = self.directory / f".writing-{final.name}"
        if writing.exists():
            shutil.rmtree(writing)
        writing.mkdir()
        names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
        save_file(
            {name: tensor.contiguous() for name, tensor in _parameters(trainer.model).items()},
            writing / "model.safetensors",
        )
        moments = {
            f"{moment}/{names[id(parameter)]}": state[moment].contiguous()
            for parameter, state in trainer.optimiser.state.items()
            for moment in ("exp_avg", "exp_avg_sq")
        }
        save_file(moments, writing / "optimiser.safetensors")
        (writing / "state.json").write_text(json.dumps({"updates": trainer.updates, "history": history}))
        manifest = {path.name: _sha256(path) for path in sorted(writing.iterdir())}
        (writing / "manifest.json").write_text(json.dumps(manifest))
        for path in writing.iterdir():
            _fsync(path)
        if final.exists():
            shutil.rmtree(final)
        os.rename(writing, final)
        _fsync(self.directory)
        if not readable(final):
            raise OSError(
                f"checkpoint {final.name} reads back differently from what was written: the disk may be failing"
            )
        for old in self._all()[: -self.keep]:
            shutil.rmtree(old)
        return final

    def resume(self, trainer: Trainer) -> list[dict[str, float]]:
        """Load the newest readable checkpoint into `trainer`; returns its history, [] when there is none."""
        newest = self.newest()
        if newest is None:
            return []
        state = json.loads((newest / "state.json").read_text())
        weights = load_file(newest / "model.safetensors")
        with torch.no_grad():
            for name, parameter in _parameters(trainer.model).items():
                parameter.copy_(weights[name])
        moments = load_file(newest / "optimiser.safetensors")
        for name, parameter in trainer.model.named_parameters():
            if f"exp_avg/{name}" in moments:
                trainer.optimiser.state[parameter] = {
                    "step": torch.tensor(float(state["updates"])),
                    "exp_avg": moments[f"exp_avg/{name}"].to(parameter.device),
                    "exp_avg_sq": moments[f"exp_avg_sq/{name}"].to(parameter.device),
                }
        trainer.updates = state["updates"]
        return state["history"]

    def newest(self) -> Path | None:
        """The newest checkpoint that can be read."""
        return next((path for path in reversed(self._all()) if readable(path)), None)

    def newest_step(self) -> int:
        """The loop steps done by the newest readable checkpoint, 0 without one."""
        newest = self.newest()
        return 0 if newest is None else int(_NAME.fullmatch(newest.name).group(1))

    def _all(self) -> list[Path]:
        return sorted(path for path in self.directory.iterdir() if _NAME.fullmatch(path.name))


def readable(checkpoint: Path) -> bool:
    """Whether every file of the checkpoint's manifest is there with the digest it was written with."""
    manifest = checkpoint / "manifest.json"
    try:
        digests = json.loads(manifest.read_text())
        return all(_sha256(checkpoint / name) == digest for name, digest in digests.items())
    except (OSError, ValueError):
        return False


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
