"""What the native engine decodes with: the rows of one model call, their past, and the next logits.

Two ways to go on from a past: keys and values in one window of columns, or, for models that keep another state, the
whole text again. Legend: P prompts, B rows, V vocabulary, T tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from pipelines.generation.attention import IMPLEMENTATION

_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)
_BLOCK_ROWS, _MOST_BLOCKS = 32, 4  # of prompts that are read side by side


class Decoder(Protocol):
    """Rows that are decoded side by side. They are numbered 0 to B - 1; new ones come last."""

    def prefill(self, prompts: Sequence[list[int]]) -> Tensor:
        """Read prompts; returns logits (P, V) of the token after each."""
        ...

    def admit(self, prompts_of_rows: np.ndarray) -> None:
        """Append rows that go on from the prompts read last, by their index."""

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append one token to every row; returns logits (B, V) of the next."""
        ...

    def keep(self, alive_B: np.ndarray) -> np.ndarray:
        """Drop the rows that are not alive; returns which old rows the remaining ones are, in their new order."""
        ...


def decoder_for(model: Any, rows: int, longest_prompt: int, max_new_tokens: int, pad_id: int) -> Decoder:
    """The faster decoder that fits the model, for at most `rows` rows at a time."""
    if _keeps_keys_and_values(model):
        return WindowDecoder(model, rows, longest_prompt, max_new_tokens, pad_id)
    return RereadingDecoder(model, pad_id)


@contextmanager
def fast_attention(model: Any) -> Iterator[None]:
    """Give a model that uses SDPA on the CPU the project's attention, which is the faster one for single queries."""
    config = model.config
    before = config._attn_implementation
    if before == "sdpa" and next(model.parameters()).device.type == "cpu" and model._supports_attention_backend:
        config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = before


def _keeps_keys_and_values(model: Any) -> bool:
    """Whether the model's past is one key and one value per layer and token, and it is told where a token stands."""
    takes = inspect.signature(model.forward).parameters
    if getattr(model, "_is_stateful", False) or not {"past_key_values", "position_ids"} <= takes.keys():
        return False
    return all(type(layer) in _PLAIN for layer in DynamicCache(config=model.config).layers)


class WindowDecoder:
    """Keys and values in preallocated columns; every row ends in the same column, so a step writes one column.

    Rows are padded on the left, as every causal model of `transformers` can read them. When the columns run out the
    window moves back to the beginning, which happens once per `max_new_tokens` steps at the most.
    """

    def __init__(self, model: Any, rows: int, longest_prompt: int, max_new_tokens: int, pad_id: int) -> None:
        self.model, self.pad_id = model, pad_id
        self.device = next(model.parameters()).device
        self._first = longest_prompt  # the column that follows the prompts
        self.window = _Window(rows, longest_prompt, longest_prompt + 2 * max_new_tokens)
        self.cache: Cache | None = None
        self.lengths_B = np.zeros(0, dtype=np.int64)  # tokens that each row has in the window
        self._lengths_P = np.zeros(0, dtype=np.int64)  # of the prompts read last
        self._read: list[tuple[np.ndarray, DynamicCache]] = []  # them by blocks, rising indices, and their past

    def prefill(self, prompts: Sequence[list[int]]) -> Tensor:
        self._lengths_P = np.array([len(tokens) for tokens in prompts])
        self._read = []
        logits: list[Tensor] = []
        for block in _blocks(self._lengths_P):
            lengths_P = self._lengths_P[block]
            width = int(lengths_P.max())
            tokens_P_T = torch.tensor(
                [[self.pad_id] * (width - len(prompts[index])) + prompts[index] for index in block], device=self.device
            )
            mask_P_T = self._mask(lengths_P, width)
            cache = DynamicCache()
            logits.append(self._forward(tokens_P_T, mask_P_T, (mask_P_T.cumsum(1) - 1).clamp(min=0), cache))
            self._read.append((block, cache))
        back = np.argsort(np.concatenate([block for block, _ in self._read]))
        return torch.cat(logits)[torch.from_numpy(back).to(self.device)]

    def admit(self, prompts_of_rows: np.ndarray) -> None:
        first = len(self.lengths_B)
        for block, read in self._read:
            if self.cache is None:
                self.cache = Cache(layers=[_WindowLayer(self.window, layer) for layer in read.layers])
            rows = np.flatnonzero(np.isin(prompts_of_rows, block))
            of_rows = np.searchsorted(block, prompts_of_rows[rows])
            source, target = (torch.from_numpy(index).to(self.device) for index in (of_rows, first + rows))
            for layer, new in zip(self.cache.layers, read.layers, strict=True):
                columns = slice(self.window.end - new.keys.shape[2], self.window.end)
                layer.keys[target, :, columns] = new.keys[source]
                layer.values[target, :, columns] = new.values[source]
        self.lengths_B = np.concatenate([self.lengths_B, self._lengths_P[prompts_of_rows]])

    def step(self, tokens_B: Tensor) -> Tensor:
        window = self.window
        width = int(self.lengths_B.max())
        window.start = window.end - width
        if window.end == window.columns:
            self._move_back(max(self._first, width))
        positions_B = torch.from_numpy(self.lengths_B).to(self.device)
        mask_B_T = self._mask(self.lengths_B + 1, width + 1)
        logits_B_V = self._forward(tokens_B[:, None], mask_B_T, positions_B[:, None], self.cache)
        window.end += 1
        self.lengths_B = self.lengths_B + 1
        return logits_B_V

    def keep(self, alive_B: np.ndarray) -> np.ndarray:
        order = _closed_up(alive_B)
        moved = np.flatnonzero(order != np.arange(len(order)))
        if len(moved) and self.cache is not None:
            target, source = (torch.from_numpy(rows).to(self.device) for rows in (moved, order[moved]))
            columns = slice(self.window.end - int(self.lengths_B.max()), self.window.end)
            for layer in self.cache.layers:
                layer.keys[target, :, columns] = layer.keys[source, :, columns]
                layer.values[target, :, columns] = layer.values[source, :, columns]
        self.lengths_B = self.lengths_B[order]
        return order

    def _move_back(self, end: int) -> None:
        window, rows = self.window, len(self.lengths_B)
        width = window.end - window.start
        for layer in self.cache.layers:
            for tensor in (layer.keys, layer.values):
                tensor[:rows, :, end - width : end] = tensor[:rows, :, window.start : window.end].clone()
        window.start, window.end = end - width, end

    def _mask(self, lengths_B: np.ndarray, width: int) -> Tensor:
        columns = torch.arange(width, device=self.device)
        return columns >= (width - torch.from_numpy(lengths_B).to(self.device))[:, None]

    def _forward(self, tokens_B_T: Tensor, mask_B_T: Tensor, positions_B_T: Tensor, cache: Cache) -> Tensor:
        return self.model(
            input_ids=tokens_B_T,
            attention_mask=mask_B_T,
            position_ids=positions_B_T,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


class RereadingDecoder:
    """No cache: every step reads the whole text again, padded on the right, which no causal model can see.

    For models that keep a recurrent state instead of keys and values, and those that count positions themselves.
    """

    def __init__(self, model: Any, pad_id: int) -> None:
        self.model, self.pad_id = model, pad_id
        self.rows: list[list[int]] = []
        self._prompts: Sequence[list[int]] = []

    def prefill(self, prompts: Sequence[list[int]]) -> Tensor:
        self._prompts = prompts
        return self._read(prompts)

    def admit(self, prompts_of_rows: np.ndarray) -> None:
        self.rows += [list(self._prompts[index]) for index in prompts_of_rows]

    def step(self, tokens_B: Tensor) -> Tensor:
        for row, token in zip(self.rows, tokens_B.tolist(), strict=True):
            row.append(token)
        return self._read(self.rows)

    def keep(self, alive_B: np.ndarray) -> np.ndarray:
        order = np.flatnonzero(alive_B)
        self.rows = [self.rows[index] for index in order]
        return order

    def _read(self, rows: Sequence[list[int]]) -> Tensor:
        width = max(map(len, rows))
        device = next(self.model.parameters()).device
        tokens_B_T = torch.tensor([row + [self.pad_id] * (width - len(row)) for row in rows], device=device)
        logits_B_T_V = self.model(input_ids=tokens_B_T, use_cache=False).logits
        last_B = torch.tensor([len(row) - 1 for row in rows], device=device)
        return logits_B_T_V[torch.arange(len(rows), device=device), last_B]


class _Window:
    """Columns [start, end) of `columns` are in use."""

    def __init__(self, rows: int, end: int, columns: int) -> None:
        self.rows, self.start, self.end, self.columns = rows, end, end, columns


class _WindowLayer(CacheLayerMixin):
    """Keys and values of one layer, (rows, heads, columns, head dimension); a view of the window is what is read."""

    is_sliding = False

    def __init__(self, window: _Window, like: DynamicLayer) -> None:
        super().__init__()
        self.window = window
        self.lazy_initialization(like.keys, like.values)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def room(states: Tensor) -> Tensor:
            return states.new_zeros(self.window.rows, states.shape[1], self.window.columns, states.shape[3])

        self.keys, self.values, self.is_initialized = room(key_states), room(value_states), True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows, count = key_states.shape[0], key_states.shape[2]
        start, end = self.window.start, self.window.end
        self.keys[:rows, :, end : end + count] = key_states
        self.values[:rows, :, end : end + count] = value_states
        return self.keys[:rows, :, start : end + count], self.values[:rows, :, start : end + count]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.window.end - self.window.start

    def get_max_length(self) -> int:
        return -1


def _blocks(lengths_P: np.ndarray) -> list[np.ndarray]:
    """Prompts that are read side by side, as rising indices: of similar length, since all are padded to the longest."""
    count = min(_MOST_BLOCKS, max(1, len(lengths_P) // _BLOCK_ROWS))
    return [np.sort(block) for block in np.array_split(np.argsort(lengths_P, kind="stable"), count)]


def _closed_up(alive_B: np.ndarray) -> np.ndarray:
    """Rows that fill 0 to (number alive - 1): those alive stay where they can, the last ones fill the gaps."""
    count = int(alive_B.sum())
    order = np.arange(count)
    order[~alive_B[:count]] = count + np.flatnonzero(alive_B[count:])
    return order
