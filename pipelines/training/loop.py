"""The one training loop. A stage gives it a trainer and a function from step to units.

`optimise` is the whole method: take the units of the step, update, report, checkpoint. Resuming means calling it again:
everything that has happened comes from the newest readable checkpoint, and `units_at` is a pure function of (step,
weights, controllers).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipelines.training.batch import Unit, indices_at
from pipelines.training.checkpoint import CheckpointStore
from pipelines.training.progress import Controller, Progress
from pipelines.training.trainer import Trainer

Report = Callable[[int, int, dict[str, float]], None]
"""Called after every loop step with (steps done, steps in all, metrics and speed)."""

UnitsAt = Callable[[int], tuple[Sequence[Sequence[Unit]], dict[str, float]]]
"""From a loop step (from 0) to the units of each of its updates, and what to log beside the losses.

One update for supervised stages; for RL as many as a rollout batch is used for, none where it has nothing to teach.
"""


def epochs(units: Sequence[Unit], batch_size: int, seed: int) -> UnitsAt:
    """One update per step on `batch_size` of `units`, in one seeded order per epoch after another."""
    return lambda step: ([[units[index] for index in indices_at(step, batch_size, seed, len(units))]], {})


def optimise(
    trainer: Trainer,
    steps: int,
    units_at: UnitsAt,
    checkpoints: CheckpointStore,
    every: int,
    report: Report,
    controllers: Mapping[str, Controller] | None = None,
    on_checkpoint: Callable[[int], Mapping[Path, str]] = lambda tick: {},
) -> list[dict[str, float]]:
    """Run loop steps until `steps`, from the newest checkpoint if there is one; returns the metrics of every step.

    A checkpoint is written every `every` updates, also between two updates of one step, and at the end. The trained
    model is then the one to publish (`Trainer.finish`).
    on_checkpoint(tick): called before the checkpoint `tick` is written, for what must be on disk by then; returns those
    files with their SHA-256.
    """
    controllers = controllers or {}
    progress = checkpoints.resume(trainer, controllers) or Progress()

    def tick(is_last: bool) -> None:
        progress.ticks += 1
        if progress.ticks % every == 0 or is_last:
            checkpoints.save(trainer, progress, controllers, on_checkpoint(progress.ticks))

    while len(progress.history) < steps:
        began = time.perf_counter()
        step = len(progress.history)
        if progress.updates is None:
            progress.updates, progress.metrics = units_at(step)
        waiting = progress.updates[len(progress.measured) :]
        sampled = time.perf_counter()
        for units in waiting[:-1]:
            progress.measured.append(trainer.update(units))
            tick(is_last=False)
        progress.measured += [trainer.update(units) for units in waiting[-1:]]
        metrics = progress.end_step()
        ended = time.perf_counter()
        trained_on = [unit for units in waiting for unit in units]
        report(step + 1, steps, metrics | trainer.speed(trained_on, ended - began, ended - sampled))
        tick(is_last=step + 1 == steps)
    trainer.finish()
    return progress.history


def history_table(history: list[dict[str, float]], path: Path) -> None:
    """Write the metrics of every step as a Parquet table with a `step` column (from 1); null where a step has none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"step": pa.array(range(1, len(history) + 1), pa.int32())}
    for name in sorted({name for row in history for name in row}):
        columns[name] = pa.array([row.get(name) for row in history], pa.float64())
    pq.write_table(pa.table(columns), path, compression="zstd")
