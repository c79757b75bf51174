"""Sequences, and how they become padded micro-batches.

Legend: B sequences of a micro-batch, T tokens (padded). A unit is a tuple of sequences that must stay together (one for
language modelling, chosen and rejected for a preference).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequence:
    """Token ids (T,) and what the loss components need, float arrays (T,): entry t concerns predicting token t."""

    tokens: np.ndarray
    values: dict[str, np.ndarray] = field(default_factory=dict)


Unit = tuple[Sequence, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded tensors: with causal attention, padding on the right changes no real position."""

    tokens_B_T: Tensor
    lengths_B: Tensor
    values: dict[str, Tensor]  # name -> (B, T), 0 in the padding
    units: tuple[int, ...]  # which units these are, as indices into the step's list


def micro_batches(units: Seq[Unit], micro_tokens: int, pad_id: int, device: torch.device) -> Iterator[MicroBatch]:
    """Units by length (stable), cut so that sequences x longest stays within `micro_tokens` (one unit at the least)."""
    order = sorted(range(len(units)), key=lambda index: _length(units[index]))
    cut: list[int] = []
    rows = 0
    for index in order:
        if cut and (rows + len(units[index])) * _length(units[index]) > micro_tokens:
            yield collate(units, cut, pad_id, device)
            cut, rows = [], 0
        cut.append(index)
        rows += len(units[index])
    if cut:
        yield collate(units, cut, pad_id, device)


def collate(units: Seq[Unit], indices: Seq[int], pad_id: int, device: torch.device) -> MicroBatch:
    """Pad the sequences of the units at `indices` to the longest of them, unit by unit in that order."""
    sequences = [sequence for index in indices for sequence in units[index]]
    width = max(len(sequence.tokens) for sequence in sequences)
    tokens_B_T = np.full((len(sequences), width), pad_id, dtype=np.int64)
    values = {name: np.zeros((len(sequences), width), dtype=np.float32) for name in sequences[0].values}
    for row, sequence in enumerate(sequences):
        length = len(sequence.tokens)
        tokens_B_T[row, :length] = sequence.tokens
        for name, array in sequence.values.items():
            values[name][row, :length] = array
    lengths_B = torch.tensor([len(sequence.tokens) for sequence in sequences], device=device)
    tensors = {name: torch.from_numpy(array).to(device) for name, array in values.items()}
    return MicroBatch(torch.from_numpy(tokens_B_T).to(device), lengths_B, tensors, tuple(indices))


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order of `count` items in one epoch: a permutation that depends on (seed, epoch, count) only."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


def indices_at(step: int, size: int, seed: int, count: int) -> np.ndarray:
    """The items of step `step` (from 0) when `size` at a time are taken from one epoch order after another.

    A batch may straddle two epochs, so every item is seen equally often whatever `size` is.
    """
    first = step * size
    wanted = np.arange(first, first + size)
    orders = {int(epoch): epoch_order(seed, int(epoch), count) for epoch in np.unique(wanted // count)}
    return np.array([orders[int(position // count)][position % count] for position in wanted])


def _length(unit: Unit) -> int:
    return max(len(sequence.tokens) for sequence in unit)
