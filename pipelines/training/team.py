"""The processes that train one model together, under `torchrun`; alone, a team of one.

All of them run the same stage code on the same data. Each updates on its share of the units; weights, gradients and
optimiser state are sharded over them (FSDP2, Zhao et al. 2023). Only the first one writes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from pipelines.devices import device

Item = TypeVar("Item")
_PATIENCE = timedelta(days=1)  # of processes that wait for one another; `torchrun` ends them when one of them dies


class Dismissed(Exception):
    """Raised when training is over in every process but the first, whose work the rest of the stage is."""


class Team:
    """The process group this process is in, or none."""

    def __init__(self) -> None:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if distributed else 0
        self.size = torch.distributed.get_world_size() if distributed else 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item], size_of: Callable[[Item], int]) -> list[Item]:
        """This process's part of `items`: dealt out by falling size, so that the parts weigh about the same."""
        order = sorted(range(len(items)), key=lambda index: -size_of(items[index]))
        return [items[index] for index in sorted(order[self.rank :: self.size])]

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """The sums over all processes; every one of them must have the same names."""
        if self.size == 1:
            return values
        names = sorted(values)
        sums = torch.tensor([values[name] for name in names], dtype=torch.float64, device=_wire())
        torch.distributed.all_reduce(sums)
        return dict(zip(names, sums.tolist(), strict=True))

    def most(self, count: int) -> int:
        """The largest `count` of any process."""
        if self.size == 1:
            return count
        found = torch.tensor(count, device=_wire())
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return int(found)

    def gather(self, item: Item) -> list[Item]:
        """What each process has, in the order of their ranks, to all of them."""
        if self.size == 1:
            return [item]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, item)
        return found

    def tell(self, item: Item) -> Item:
        """What the first process has, to all of them."""
        if self.size == 1:
            return item
        told = [item]
        torch.distributed.broadcast_object_list(told, src=0)
        return told[0]

    def wait(self) -> None:
        """Go on when all have come here."""
        if self.size > 1:
            torch.distributed.barrier()

    def dismiss(self) -> None:
        """End the work of every process but the first. Raises Dismissed in them."""
        if self.size > 1:
            self.wait()
            torch.distributed.destroy_process_group()
            if not self.is_first:
                raise Dismissed


def gather_team() -> Team:
    """Join the processes that `torchrun` started; returns when all are there."""
    kind = device().type
    if kind == "cuda":
        torch.cuda.set_device(device())
    torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=_PATIENCE)
    return Team()


class Sharded(torch.nn.Module):
    """A copy of a model with its parameters sharded, and the forward function that uses it.

    A module of its own, because parameters are whole during the call of a module only.
    """

    def __init__(self, model: Any, forward: Callable[[Any, Any], Sequence[Tensor | None]]) -> None:
        from torch.distributed.fsdp import fully_shard

        super().__init__()
        self.model, self._forward = copy.deepcopy(model).cpu(), forward
        mesh = torch.distributed.init_device_mesh(device().type, (torch.distributed.get_world_size(),))
        blocks = [part for part in self.model.modules() if type(part).__name__ in (model._no_split_modules or ())]
        for part in (*blocks, self):
            fully_shard(part, mesh=mesh)
            part.set_gradient_divide_factor(1.0)  # the loss is divided by its global denominator already
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def forward(self, batch: Any) -> tuple[Tensor | None, ...]:
        # a hook on each output brings the parameters back for the backward pass; it is lost on a view
        outputs = self._forward(self.model, batch)
        return tuple(output.clone() if output is not None and output._is_view() else output for output in outputs)


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which this process may have a shard only. All processes must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, sharded as `parameter` is."""
    if not hasattr(parameter, "placements"):
        return tensor.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


def _wire() -> torch.device:
    return device() if torch.distributed.get_backend() == "nccl" else torch.device("cpu")
