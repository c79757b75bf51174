"""A model with its optimiser: one call, one update on all units of a step, however they are cut into micro-batches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pipelines.errors import UserError
from pipelines.training import lora
from pipelines.training.batch import MicroBatch, Unit, micro_batches
from pipelines.training.components import Component, Outputs, token_outputs
from pipelines.training.settings import Optimiser, Training

_BETAS = (0.9, 0.95)
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Trainer:
    """A model, its AdamW state and the number of updates done. One call of `update` is one optimiser step.

    The model is trained in place. With adapters or a moving average, its weights are those that are to be published
    after `finish` only.
    """

    def __init__(
        self,
        model: Any,
        components: Sequence[Component],
        params: Training,
        total_updates: int,
        pad_id: int,
        forward: Callable[[Any, MicroBatch], Outputs] = token_outputs,
    ):
        self.model, self.components, self.params = model, list(components), params
        self.total_updates, self.pad_id, self.forward = total_updates, pad_id, forward
        self.updates = 0
        if params.lora is not None:
            lora.attach(model, params.lora)
        if params.compute.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if params.compute.compile:
            model.base_model.compile(dynamic=True)
        self.parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        decay = params.optimiser.weight_decay
        values = self.parameters.values()
        self.optimiser = torch.optim.AdamW(
            [
                {"params": [value for value in values if value.ndim >= 2], "weight_decay": decay},
                {"params": [value for value in values if value.ndim < 2], "weight_decay": 0.0},
            ],
            lr=params.optimiser.lr,
            betas=_BETAS,
            foreach=True,
        )
        self.average: dict[str, Tensor] = {}
        if params.optimiser.ema is not None:
            self.average = {name: value.detach().clone() for name, value in self.parameters.items()}

    def update(self, units: Sequence[Unit]) -> dict[str, float]:
        """One optimiser step on all of `units`; returns losses, measures, gradient norm and learning rate.

        Raises UserError when no component has anything to learn from the units, FloatingPointError when the loss or the
        gradient is not finite: the weights are then still the old ones.
        """
        denominators = {component.name: component.denominator(units) for component in self.components}
        if not any(denominators.values()):
            raise UserError(f"update {self.updates + 1}: none of the tokens of its {len(units)} units is to be learned")
        sums: dict[str, Tensor | float] = defaultdict(float)
        self.model.train()
        self.optimiser.zero_grad(set_to_none=True)
        for batch in self._micro_batches(units):
            with self._precision(batch.tokens_B_T.device):
                outputs = self.forward(self.model, batch)
            loss = self._loss(outputs, batch, denominators, sums)
            if loss.requires_grad:
                loss.backward()
        found = {name: float(value) for name, value in sums.items()}
        settings = self.params.optimiser
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), settings.clip_norm))
        if not math.isfinite(norm) or not all(map(math.isfinite, found.values())):
            raise FloatingPointError(
                f"update {self.updates + 1}: gradient norm {norm}, losses {found}; nothing was changed"
            )
        lr = learning_rate(settings, self.updates, self.total_updates)
        for group in self.optimiser.param_groups:
            group["lr"] = lr
        self.optimiser.step()
        self.updates += 1
        for name, average in self.average.items():
            average.lerp_(self.parameters[name].detach(), 1.0 - settings.ema)
        return found | {"gradient_norm": norm, "lr": lr}

    def finish(self) -> None:
        """Leave in the model what is to be published: the moving average if there is one, adapters merged."""
        with torch.no_grad():
            for name, average in self.average.items():
                self.parameters[name].copy_(average)
        if self.params.lora is not None:
            lora.merge(self.model)

    def weights(self) -> dict[str, Tensor]:
        """The weights to sample from now, by their ordinary names."""
        return self.model.state_dict() if self.params.lora is None else lora.merged_weights(self.model)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything that `restore` needs beside the number of updates, by name of the part and of the parameter."""
        names = {id(value): name for name, value in self.parameters.items()}
        moments = {
            f"{moment}/{names[id(parameter)]}": state[moment].contiguous()
            for parameter, state in self.optimiser.state.items()
            for moment in _MOMENTS
        }
        parts = {
            "model": {name: value.detach().contiguous() for name, value in self.parameters.items()},
            "optimiser": moments,
            "average": self.average,
        }
        return {name: tensors for name, tensors in parts.items() if tensors}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
        """Go on from a `state` that was taken after `updates` updates."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state["model"][name])
            if self.average:
                self.average[name].copy_(state["average"][name])
            if updates:
                moments = {moment: state["optimiser"][f"{moment}/{name}"].to(parameter.device) for moment in _MOMENTS}
                self.optimiser.state[parameter] = {"step": torch.tensor(float(updates)), **moments}
        self.updates = updates

    def speed(self, tokens: int, seconds: float) -> dict[str, float]:
        """What to report of a loop step that trained on `tokens` tokens and took `seconds`, sampling included."""
        return {"tokens_per_second": tokens / seconds} if tokens else {}

    def _micro_batches(self, units: Sequence[Unit]) -> Iterator[MicroBatch]:
        device = next(iter(self.parameters.values())).device
        return micro_batches(units, self.params.compute.layout, self.params.compute.micro_tokens, self.pad_id, device)

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.params.compute.precision == "float32":
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16)

    def _loss(
        self, outputs: Outputs, batch: MicroBatch, denominators: dict[str, float], sums: dict[str, Tensor | float]
    ) -> Tensor:
        """The loss of a micro-batch; its parts and measures are added to `sums`."""
        total = torch.zeros((), device=batch.tokens_B_T.device)
        for component in self.components:
            denominator = denominators[component.name]
            if denominator == 0:
                continue
            part = component.loss(outputs, batch) / denominator
            total = total + component.coefficient * part
            sums[f"loss/{component.name}"] += part.detach().double()
            with torch.no_grad():
                for name, value in component.measure(outputs, batch).items():
                    sums[name] += value.double() / denominator
        return total


def learning_rate(settings: Optimiser, update: int, total: int) -> float:
    """The learning rate of update `update` (from 0): linear warm-up, then the schedule down to 0 at `total`."""
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    share = (update - settings.warmup_steps) / max(1, total - settings.warmup_steps)
    shapes = {"constant": 1.0, "linear": 1.0 - share, "cosine": 0.5 * (1.0 + math.cos(math.pi * share))}
    return settings.lr * shapes[settings.schedule]
