"""A model with its optimiser: one call, one update on all units of a step, however they are cut into micro-batches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pipelines.devices import device
from pipelines.errors import UserError
from pipelines.training import lora
from pipelines.training.batch import MicroBatch, Unit, micro_batches
from pipelines.training.components import Component, Outputs, token_outputs
from pipelines.training.layouts import refuse_misread
from pipelines.training.settings import Optimiser, Training
from pipelines.training.speed import Work, peak
from pipelines.training.team import Sharded, Team, like, whole

_BETAS = (0.9, 0.95)
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Trainer:
    """A model, its AdamW state and the number of updates done. One call of `update` is one optimiser step.

    The model is trained in place. With adapters or a moving average, its weights are those that are to be published
    after `finish` only. In a team the processes train a sharded copy, and `finish` brings its weights back.
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
        self.updates, self.team = 0, Team()
        model.to(device())
        refuse_misread(model, params.compute.layout)
        if params.lora is not None:
            lora.attach(model, params.lora)
        if params.compute.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if params.compute.compile:
            model.base_model.compile(dynamic=True)
        self._work = Work.of(model)
        self._sharded = Sharded(model, lambda *inputs: vars(forward(*inputs)).values()) if self.team.size > 1 else None
        self.trained = model if self._sharded is None else self._sharded.model
        self.parameters = {name: value for name, value in self.trained.named_parameters() if value.requires_grad}
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
        _without_noise(self.trained)
        self.optimiser.zero_grad(set_to_none=True)
        for batch, counts in self._micro_batches(units):
            with self._precision(batch.tokens_B_T.device):
                outputs = self._outputs(batch)
            loss = self._loss(outputs, batch, denominators, counts, sums)
            if loss.requires_grad:
                loss.backward()
        found = self.team.total({name: float(value) for name, value in sums.items()})
        settings = self.params.optimiser
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.parameters.values(), settings.clip_norm)))
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
            if self._sharded is not None:
                own = dict(self.model.named_parameters())
                for name, value in self.parameters.items():
                    own[name].copy_(whole(value))
        self.team.dismiss()
        if self.params.lora is not None:
            lora.merge(self.model)

    def weights(self) -> dict[str, Tensor]:
        """The weights to sample from now, by their ordinary names."""
        if self.params.lora is not None:
            return lora.merged_weights(self.trained)
        return {name: whole(value) for name, value in self.trained.state_dict().items()}

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything that `restore` needs beside the number of updates, by name of the part and of the parameter."""
        names = {id(value): name for name, value in self.parameters.items()}
        moments = {
            f"{moment}/{names[id(parameter)]}": whole(state[moment]).contiguous()
            for parameter, state in self.optimiser.state.items()
            for moment in ("step", *_MOMENTS)
        }
        parts = {
            "model": {name: whole(value.detach()).contiguous() for name, value in self.parameters.items()},
            "optimiser": moments,
            "average": {name: whole(value) for name, value in self.average.items()},
        }
        return {name: tensors for name, tensors in parts.items() if tensors}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Mapping[str, Tensor]], updates: int) -> None:
        """Go on from a `state` that was taken after `updates` updates."""
        moments = state.get("optimiser", {})
        for name, parameter in self.parameters.items():
            parameter.copy_(like(state["model"][name], parameter))
            if self.average:
                self.average[name].copy_(like(state["average"][name], parameter))
            if f"step/{name}" in moments:  # one that never had a gradient has none
                found = {moment: like(moments[f"{moment}/{name}"], parameter) for moment in _MOMENTS}
                self.optimiser.state[parameter] = {"step": moments[f"step/{name}"], **found}
        self.updates = updates

    def speed(self, units: Sequence[Unit], seconds: float, training_seconds: float) -> dict[str, float]:
        """What to report of a loop step on `units` that took `seconds`, `training_seconds` of them in `update`."""
        if not units:
            return {}
        found = {
            "tokens_per_second": sum(map(_length, units)) / seconds,
            "samples_per_second": sum(map(len, units)) / seconds,
        }
        if self._work is not None and (flops := peak(device())):
            done = self._work.flops(units, self.params.compute.layout)
            found["model_flop_utilisation"] = done / training_seconds / (flops * self.team.size)
        return found

    def _micro_batches(self, units: Sequence[Unit]) -> Iterator[tuple[MicroBatch, float]]:
        """This process's micro-batches, each with a factor 1; where others have more, one again with a factor 0."""
        compute = self.params.compute
        share = self.team.share(units, _length)
        batches = list(micro_batches(share or units[:1], compute.layout, compute.micro_tokens, self.pad_id, device()))
        for number in range(self.team.most(len(batches))):
            counts = number < len(batches) and len(share) > 0
            yield batches[number if counts else 0], float(counts)

    def _outputs(self, batch: MicroBatch) -> Outputs:
        if self._sharded is None:
            return self.forward(self.trained, batch)
        return Outputs(*self._sharded(batch))

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.params.compute.precision == "float32":
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16)

    def _loss(
        self,
        outputs: Outputs,
        batch: MicroBatch,
        denominators: dict[str, float],
        factor: float,
        sums: dict[str, Tensor | float],
    ) -> Tensor:
        """`factor` times the loss of a micro-batch; its parts and measures are added to `sums`."""
        total = torch.zeros((), device=batch.tokens_B_T.device)
        for component in self.components:
            if denominators[component.name] == 0:
                continue
            share = factor / denominators[component.name]
            part = component.loss(outputs, batch) * share
            total = total + component.coefficient * part
            sums[f"loss/{component.name}"] += part.detach().double()
            with torch.no_grad():
                for name, value in component.measure(outputs, batch).items():
                    sums[name] += value.double() * share
        return total


def _without_noise(model: torch.nn.Module) -> None:
    """No dropout and no jitter: a step is a function of weights and units. Layers that compute again must be told."""
    model.eval()
    for part in model.modules():
        if getattr(part, "gradient_checkpointing", False):
            part.training = True
            for name in [name for name, value in vars(part).items() if "drop" in name and isinstance(value, float)]:
                setattr(part, name, 0.0)


def _length(unit: Unit) -> int:
    return sum(len(sequence.tokens) for sequence in unit)


def learning_rate(settings: Optimiser, update: int, total: int) -> float:
    """The learning rate of update `update` (from 0): linear warm-up, then the schedule down to 0 at `total`."""
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    share = (update - settings.warmup_steps) / max(1, total - settings.warmup_steps)
    shapes = {"constant": 1.0, "linear": 1.0 - share, "cosine": 0.5 * (1.0 + math.cos(math.pi * share))}
    return settings.lr * shapes[settings.schedule]
