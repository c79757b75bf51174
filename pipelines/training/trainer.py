"""A model with its optimiser: one call, one update on all units of a step, however they are cut into micro-batches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from pipelines.training.batch import MicroBatch, Unit, micro_batches
from pipelines.training.components import Component, Outputs, token_outputs
from pipelines.training.settings import Optimiser


class Trainer:
    """A model, its AdamW state and the number of updates done. One call of `update` is one optimiser step."""

    def __init__(
        self,
        model: torch.nn.Module,
        components: Sequence[Component],
        settings: Optimiser,
        total_updates: int,
        pad_id: int,
        forward: Callable[[torch.nn.Module, MicroBatch], Outputs] = token_outputs,
    ):
        self.model, self.components, self.settings = model, list(components), settings
        self.total_updates, self.pad_id, self.forward = total_updates, pad_id, forward
        self.updates = 0
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in parameters if parameter.ndim < 2]
        self.optimiser = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=(0.9, 0.95),
            foreach=True,
        )
        self.parameters = parameters

    def update(self, units: Sequence[Unit]) -> dict[str, float]:
        """One optimiser step on all of `units`; returns losses, measures, gradient norm and learning rate.

        Raises FloatingPointError when the loss or the gradient is not finite: the weights are then still the old ones.
        """
        device = self.parameters[0].device
        denominators = {component.name: component.denominator(units) for component in self.components}
        sums: dict[str, float] = defaultdict(float)
        self.model.train()
        self.optimiser.zero_grad(set_to_none=True)
        for batch in micro_batches(units, self.settings.micro_tokens, self.pad_id, device):
            outputs = self.forward(self.model, batch)
            total = torch.zeros((), device=device)
            for component in self.components:
                denominator = denominators[component.name]
                if denominator == 0:
                    continue
                part = component.loss(outputs, batch) / denominator
                total = total + component.coefficient * part
                sums[f"loss/{component.name}"] += float(part.detach())
                with torch.no_grad():
                    for name, value in component.measure(outputs, batch).items():
                        sums[name] += float(value) / denominator
            if total.requires_grad:
                total.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_norm))
        if not math.isfinite(norm) or not all(math.isfinite(value) for value in sums.values()):
            raise FloatingPointError(
                f"update {self.updates + 1}: gradient norm {norm}, losses {dict(sums)}; nothing was changed"
            )
        lr = learning_rate(self.settings, self.updates, self.total_updates)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        self.updates += 1
        return sums | {"gradient_norm": norm, "lr": lr}


def learning_rate(settings: Optimiser, update: int, total: int) -> float:
    """The learning rate of update `update` (from 0): linear warm-up, then the schedule down to 0 at `total`."""
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    share = (update - settings.warmup_steps) / max(1, total - settings.warmup_steps)
    shapes = {"constant": 1.0, "linear": 1.0 - share, "cosine": 0.5 * (1.0 + math.cos(math.pi * share))}
    return settings.lr * shapes[settings.schedule]
