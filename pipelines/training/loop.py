"""The one training loop. A stage gives it a trainer and a function from step to units.

`optimise` is the whole method: take the units of the step, update, report, checkpoint. Resuming means calling it again:
the trainer's state comes from the newest readable checkpoint and `units_at` is a pure function of (step, weights).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.training.batch import Unit, indices_at
from pipelines.training.checkpoint import CheckpointStore
from pipelines.training.trainer import Trainer

Report = Callable[[int, int, dict[str, float]], None]
"""Called after every loop step with (steps done, steps in all, metrics)."""

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
    on_checkpoint: Callable[[int], None] = lambda step: None,
) -> list[dict[str, float]]:
    """Run loop steps until `steps`, from the newest checkpoint if there is one; returns the metrics of every step.

    on_checkpoint(step): called before step `step`'s checkpoint is written, for what must be on disk by then.
    """
    history: list[dict[str, float]] = checkpoints.resume(trainer)
    for step in range(len(history), steps):
        updates, metrics = units_at(step)
        measured = [trainer.update(units) for units in updates]
        for name in measured[0] if measured else ():
            metrics[name] = sum(update[name] for update in measured) / len(measured)
        history.append(metrics)
        report(step + 1, steps, metrics)
        if (step + 1) % every == 0 or step + 1 == steps:
            on_checkpoint(step + 1)
            checkpoints.save(trainer, history)
    return history


def history_table(history: list[dict[str, float]], path: Path) -> None:
    """Write the metrics of every step as a Parquet table with a `step` column (from 1); null where a step has none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"step": pa.array(range(1, len(history) + 1), pa.int32())}
    for name in sorted({name for row in history for name in row}):
        columns[name] = pa.array([row.get(name) for row in history], pa.float64())
    pq.write_table(pa.table(columns), path, compression="zstd")
