"""Sequences, and how they become the rows of a micro-batch.

Legend: S sequences, B rows, T columns, N scored tokens. A unit is a tuple of sequences that must stay together: one for
language modelling, chosen and rejected for a preference, the rollouts of one problem for a policy.

Three layouts give the same loss:
padded   a row per sequence, padded on the right; with causal attention that changes no real position
packed   several sequences behind one another in a row, positions starting anew; no padding to speak of
shared   a row per unit: what all its sequences begin with once, then their rests, which do not see each other
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Layout = Literal["padded", "packed", "shared"]


@dataclass(frozen=True)
class Sequence:
    """Token ids (T,) and what the loss components need, float arrays (T,): entry t concerns predicting token t.

    A token is scored when any of its values is not 0. The first token never is: nothing predicts it.
    """

    tokens: np.ndarray
    values: dict[str, np.ndarray] = field(default_factory=dict)

    def scored(self) -> np.ndarray:
        """The positions of the scored tokens, ascending."""
        found = np.zeros(len(self.tokens), dtype=bool)
        for array in self.values.values():
            found |= array != 0
        found[:1] = False
        return np.flatnonzero(found)


Unit = tuple[Sequence, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward pass, and where in them the scored tokens are predicted."""

    tokens_B_T: Tensor
    positions_B_T: Tensor | None  # None where every row is one sequence
    mask_B_1_T_T: Tensor | None  # which columns a column may see; None where causality says it all
    rows_N: Tensor  # scored token -> the row
    columns_N: Tensor  # and the column whose output predicts it
    targets_N: Tensor  # and its id
    sequences_N: Tensor  # and its sequence, numbered in the order of `ends_S`
    values: dict[str, Tensor]  # name -> (N,)
    ends_S: tuple[Tensor, Tensor]  # row and column of the last token of each sequence, unit by unit
    units: tuple[int, ...]  # which units these are, as indices into the step's list


@dataclass(frozen=True)
class _Row:
    """One row: its tokens, their positions and segments, and the columns in which each sequence has its tokens."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray  # 0 is seen by all that follows, other segments by themselves only
    sequences: list[tuple[Sequence, np.ndarray]]


@dataclass(frozen=True)
class _Block:
    """Rows that belong into one micro-batch, with the units they hold."""

    rows: list[_Row]
    units: list[int]

    @property
    def width(self) -> int:
        return max(len(row.tokens) for row in self.rows)


def micro_batches(
    units: Seq[Unit], layout: Layout, micro_tokens: int, pad_id: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Blocks of rows by width (stable), cut so that rows x columns stays within `micro_tokens` (one block at least)."""
    blocks = {"padded": _padded, "packed": _packed, "shared": _shared}[layout](units)
    cut: list[_Block] = []
    for block in sorted(blocks, key=lambda block: block.width):
        if cut and (sum(len(b.rows) for b in cut) + len(block.rows)) * block.width > micro_tokens:
            yield _collate(cut, layout, pad_id, device)
            cut = []
        cut.append(block)
    if cut:
        yield _collate(cut, layout, pad_id, device)


def _padded(units: Seq[Unit]) -> list[_Block]:
    return [_Block([_joined([sequence]) for sequence in unit], [index]) for index, unit in enumerate(units)]


def _packed(units: Seq[Unit]) -> list[_Block]:
    """Units by falling length, each into the first row that has room (first fit decreasing); rows as long as the
    longest unit."""
    lengths = [sum(len(sequence.tokens) for sequence in unit) for unit in units]
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(units)), key=lambda index: -lengths[index]):
        row = next((number for number, free in enumerate(room) if free >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(max(lengths))
        rows[row].append(index)
        room[row] -= lengths[index]
    return [_Block([_joined([sequence for index in row for sequence in units[index]])], row) for row in rows]


def _shared(units: Seq[Unit]) -> list[_Block]:
    return [_Block([_branched(unit)], [index]) for index, unit in enumerate(units)]


def _joined(sequences: list[Sequence]) -> _Row:
    lengths = [len(sequence.tokens) for sequence in sequences]
    starts = np.cumsum([0, *lengths[:-1]])
    return _Row(
        np.concatenate([sequence.tokens for sequence in sequences]),
        np.concatenate([np.arange(length) for length in lengths]),
        np.repeat(np.arange(1, len(sequences) + 1), lengths),
        [(sequence, start + np.arange(n)) for sequence, start, n in zip(sequences, starts, lengths, strict=True)],
    )


def _branched(unit: Unit) -> _Row:
    """A trunk that all sequences of the unit begin with, then the rest of each."""
    trunk = common_prefix(unit)
    rests = [sequence.tokens[trunk:] for sequence in unit]
    starts = trunk + np.cumsum([0, *(len(rest) for rest in rests[:-1])])
    columns = [
        np.concatenate([np.arange(trunk), start + np.arange(len(rest))])
        for start, rest in zip(starts, rests, strict=True)
    ]
    return _Row(
        np.concatenate([unit[0].tokens[:trunk], *rests]),
        np.concatenate([np.arange(trunk), *(trunk + np.arange(len(rest)) for rest in rests)]),
        np.repeat(np.arange(len(unit) + 1), [trunk, *(len(rest) for rest in rests)]),
        list(zip(unit, columns, strict=True)),
    )


def common_prefix(unit: Unit) -> int:
    """How many tokens all sequences of a unit begin with."""
    shortest = min(len(sequence.tokens) for sequence in unit)
    tokens_S_T = np.stack([sequence.tokens[:shortest] for sequence in unit])
    differs_T = (tokens_S_T != tokens_S_T[0]).any(axis=0)
    return int(differs_T.argmax()) if differs_T.any() else shortest


def _collate(blocks: list[_Block], layout: Layout, pad_id: int, device: torch.device) -> MicroBatch:
    rows = [row for block in blocks for row in block.rows]
    width = max(len(row.tokens) for row in rows)
    tokens_B_T = np.full((len(rows), width), pad_id, dtype=np.int64)
    positions_B_T = np.zeros((len(rows), width), dtype=np.int64)
    segments_B_T = np.full((len(rows), width), -1, dtype=np.int64)
    for number, row in enumerate(rows):
        length = len(row.tokens)
        tokens_B_T[number, :length] = row.tokens
        positions_B_T[number, :length] = row.positions
        positions_B_T[number, length:] = np.arange(width - length)
        segments_B_T[number, :length] = row.segments

    placed = [(number, sequence, columns) for number, row in enumerate(rows) for sequence, columns in row.sequences]
    scored = [sequence.scored() for _, sequence, _ in placed]
    names = placed[0][1].values

    def gathered(arrays: list[np.ndarray], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(dtype)).to(device)

    each = list(zip(placed, scored, strict=True))
    return MicroBatch(
        tokens_B_T=torch.from_numpy(tokens_B_T).to(device),
        positions_B_T=None if layout == "padded" else torch.from_numpy(positions_B_T).to(device),
        mask_B_1_T_T=_visible(torch.from_numpy(segments_B_T).to(device)) if layout == "shared" else None,
        rows_N=gathered([np.full(len(at), row) for (row, _, _), at in each], np.int64),
        columns_N=gathered([columns[at - 1] for (_, _, columns), at in each], np.int64),
        targets_N=gathered([sequence.tokens[at] for (_, sequence, _), at in each], np.int64),
        sequences_N=gathered([np.full(len(at), number) for number, at in enumerate(scored)], np.int64),
        values={
            name: gathered([sequence.values[name][at] for (_, sequence, _), at in each], np.float32) for name in names
        },
        ends_S=(
            torch.tensor([row for row, _, _ in placed], device=device),
            torch.tensor([int(columns[-1]) for _, _, columns in placed], device=device),
        ),
        units=tuple(index for block in blocks for index in block.units),
    )


def _visible(segments_B_T: Tensor) -> Tensor:
    """mask_B_1_T_T: earlier columns of the same segment or of segment 0."""
    of_query, of_key = segments_B_T[:, None, :, None], segments_B_T[:, None, None, :]
    width = segments_B_T.shape[1]
    earlier_T_T = torch.ones(width, width, dtype=torch.bool, device=segments_B_T.device).tril()
    return earlier_T_T & ((of_key == of_query) | (of_key == 0))


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
