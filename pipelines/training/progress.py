"""How far a training loop is: what a checkpoint holds beside the trainer's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipelines.training.batch import Unit


class Controller(Protocol):
    """Something that changes in the course of training and decides about what comes, such as a curriculum."""

    def state(self) -> dict[str, Any]:
        """All there is to remember, as JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass
class Progress:
    """How far a loop is; with the trainer's state, all that a checkpoint has to hold."""

    ticks: int = 0  # updates done, a step without any counting as one
    history: list[dict[str, float]] = field(default_factory=list)  # metrics of the steps that are over
    updates: Sequence[Sequence[Unit]] | None = None  # of the step that has begun
    metrics: dict[str, float] = field(default_factory=dict)  # of the step that has begun
    measured: list[dict[str, float]] = field(default_factory=list)  # of its updates that are done

    def end_step(self) -> dict[str, float]:
        """Close the step that has begun; returns its metrics, those of its updates as their means."""
        for name in self.measured[0] if self.measured else ():
            self.metrics[name] = sum(update[name] for update in self.measured) / len(self.measured)
        self.history.append(self.metrics)
        self.updates, self.metrics, self.measured = None, {}, []
        return self.history[-1]
