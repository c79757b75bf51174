"""Resumable training state on disk: safetensors and JSON, atomic, verified before the older one goes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from pipelines.files import remove, sha256, sync
from pipelines.training.batch import Sequence, Unit
from pipelines.training.progress import Controller, Progress
from pipelines.training.team import Team
from pipelines.training.trainer import Trainer

_NAME = re.compile(r"tick-(\d{8})")


class CheckpointStore:
    """The checkpoints of one training stage in one directory; keeps the newest `keep` that can be read.

    A checkpoint holds model, optimiser, moving average, counts (which the schedule follows from), history, the states
    of controllers and, inside a batch that serves several updates, the batch and the place in it.
    """

    def __init__(self, directory: Path, keep: int = 2):
        self.directory, self.keep = directory, keep
        directory.mkdir(parents=True, exist_ok=True)
        if Team().is_first:
            for path in directory.iterdir():
                if path.name.startswith(".writing-") or (_NAME.fullmatch(path.name) and not readable(path)):
                    remove(path)
        Team().wait()

    def save(
        self,
        trainer: Trainer,
        progress: Progress,
        controllers: Mapping[str, Controller],
        beside: Mapping[Path, str] | None = None,
    ) -> None:
        """Write a checkpoint; then drop all but the newest `keep`. In a team the first process does.

        beside: files elsewhere that belong to it, with their SHA-256; without them it cannot be read.
        """
        parts = trainer.state()
        if trainer.team.is_first:
            self._write(parts, trainer.updates, progress, controllers, beside or {})
        trainer.team.wait()

    def _write(
        self,
        parts: Mapping[str, dict[str, torch.Tensor]],
        updates: int,
        progress: Progress,
        controllers: Mapping[str, Controller],
        beside: Mapping[Path, str],
    ) -> None:
        final = self.directory / f"tick-{progress.ticks:08d}"
        writing = self.directory / f".writing-{final.name}"
        remove(writing)
        writing.mkdir()
        for name, tensors in parts.items():
            save_file(tensors, writing / f"{name}.safetensors")
        if progress.updates is not None:
            save_arrays(_arrays(progress.updates), writing / "batch.safetensors")
        state = {
            "updates": updates,
            "ticks": progress.ticks,
            "history": progress.history,
            "metrics": progress.metrics,
            "measured": progress.measured,
            "controllers": {name: controller.state() for name, controller in controllers.items()},
        }
        (writing / "state.json").write_text(json.dumps(state))
        own = {path.name: sha256(path) for path in sorted(writing.iterdir())}
        elsewhere = {os.path.relpath(path, final): digest for path, digest in beside.items()}
        (writing / "manifest.json").write_text(json.dumps({"ticks": progress.ticks, "files": own | elsewhere}))
        for path in writing.iterdir():
            sync(path)
        remove(final)
        os.rename(writing, final)
        sync(self.directory)
        if any(sha256(final / name) != digest for name, digest in own.items()):
            raise OSError(
                f"checkpoint {final.name} reads back differently from what was written: the disk may be failing"
            )
        for old in self._all()[: -self.keep]:
            remove(old)

    def resume(self, trainer: Trainer, controllers: Mapping[str, Controller]) -> Progress | None:
        """Load the newest readable checkpoint into trainer and controllers; None when there is none."""
        newest = self.newest()
        if newest is None:
            return None
        state = json.loads((newest / "state.json").read_text())
        tensors = {
            path.stem: load_file(path) for path in newest.glob("*.safetensors") if path.name != "batch.safetensors"
        }
        trainer.restore(tensors, state["updates"])
        for name, controller in controllers.items():
            controller.restore(state["controllers"][name])
        batch = newest / "batch.safetensors"
        updates = _updates(load_arrays(batch)) if batch.exists() else None
        return Progress(state["ticks"], state["history"], updates, state["metrics"], state["measured"])

    def newest(self) -> Path | None:
        """The newest checkpoint; what could not be read when the store was opened is gone."""
        return next(reversed(self._all()), None)

    def newest_tick(self) -> int:
        """The tick of the newest readable checkpoint, 0 without one."""
        newest = self.newest()
        return 0 if newest is None else int(_NAME.fullmatch(newest.name).group(1))

    def _all(self) -> list[Path]:
        return sorted(path for path in self.directory.iterdir() if _NAME.fullmatch(path.name))


def readable(checkpoint: Path) -> bool:
    """Whether a checkpoint has its own name, and each file of its manifest the digest it was written with."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        files, ticks = manifest["files"], manifest["ticks"]
        is_named = checkpoint.name == f"tick-{ticks:08d}" and {"state.json", "model.safetensors"} <= files.keys()
        return is_named and all(sha256(checkpoint / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no such file, no JSON, another shape
        return False


def _arrays(updates: Seq[Seq[Unit]]) -> dict[str, np.ndarray]:
    """The units of a batch as flat arrays: how many units an update has, sequences a unit, tokens a sequence."""
    units = [unit for update in updates for unit in update]
    sequences = [sequence for unit in units for sequence in unit]
    arrays = {
        "units": np.array([len(update) for update in updates]),
        "sequences": np.array([len(unit) for unit in units]),
        "lengths": np.array([len(sequence.tokens) for sequence in sequences]),
        "tokens": np.concatenate([sequence.tokens for sequence in sequences]),
    }
    for name in sequences[0].values:
        arrays[f"values/{name}"] = np.concatenate([sequence.values[name] for sequence in sequences])
    return arrays


def _updates(arrays: Mapping[str, np.ndarray]) -> list[list[Unit]]:
    def cut(items: Seq, sizes: np.ndarray) -> list:
        ends = np.cumsum(sizes)
        return [items[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    lengths = arrays["lengths"]
    values = {name[7:]: cut(array, lengths) for name, array in arrays.items() if name.startswith("values/")}
    sequences = [
        Sequence(tokens, {name: column[index] for name, column in values.items()})
        for index, tokens in enumerate(cut(arrays["tokens"], lengths))
    ]
    units = [tuple(unit) for unit in cut(sequences, arrays["sequences"])]
    return cut(units, arrays["units"])
