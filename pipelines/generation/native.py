"""The native engine: PyTorch, prefill shared by the samples of a prompt, continuous batching.

Works with any causal language model of `transformers`. Rows that end leave the batch and waiting samples take their
place. Legend: B rows decoded now, P prompts, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelines.base.architectures import position_limit
from pipelines.generation.decoders import decoder_for, fast_attention
from pipelines.generation.draw import draw, log_distribution, measure
from pipelines.generation.engine import Completions, Prompt, check_request, fitting_weights, tied_names
from pipelines.generation.randomness import uniforms
from pipelines.generation.settings import NativeEngineParams, Sampling

_REFILL = 0.25  # share of the rows that must be free before waiting samples are read: a prefill is a call of its own

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no character are decoded to

NOT_A_DISTRIBUTION = (
    "the model predicts NaN or infinity: its weights are damaged, training has diverged, or the number format of the "
    "engine is too small for it; go back to an earlier checkpoint or set the engine's dtype to float32"
)


class NativeEngine:
    """Samples from a `transformers` model in this process, from its parameters as they are at the call.

    model: a causal language model. tokenizer: gives the end and padding tokens, and reads stop texts.
    """

    def __init__(self, model: Any, tokenizer: Any, params: NativeEngineParams | None = None) -> None:
        self.params = params or NativeEngineParams(name="native")
        dtype = getattr(torch, self.params.dtype)
        self.model = model if model.dtype == dtype else copy.deepcopy(model).to(dtype)
        self.tokenizer = tokenizer
        self.end_ids = end_ids(model, tokenizer)
        self.version = 0

    @classmethod
    def open(cls, directory: Path, params: NativeEngineParams | None = None) -> NativeEngine:
        """An engine for a checkpoint directory."""
        from pipelines.base.architectures import load_model, load_tokenizer

        return cls(load_model(directory), load_tokenizer(directory), params)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        own = self.model.state_dict()
        for name, tensor in fitting_weights(own, weights, tied_names(own)).items():
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        self.version = version

    def close(self) -> None:
        del self.model

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, measures: Collection[str] = ()) -> Completions:
        check_request(prompts, sampling, measures, position_limit(self.model))
        training = self.model.training
        self.model.eval()
        try:
            with fast_attention(self.model), _uncompiled(self.model):
                results = self._decode(prompts, sampling, tuple(measures))
        finally:
            self.model.train(training)
        return results.completions(self.version)

    def _decode(self, prompts: Sequence[Prompt], sampling: Sampling, measures: tuple[str, ...]) -> _Results:
        waiting = _by_length(prompts)
        longest = max((len(prompt.tokens) for prompt in prompts), default=0)
        capacity = max(1, min(len(waiting), self.params.cache_tokens // (longest + sampling.max_new_tokens)))
        results = _Results(len(waiting), capacity, sampling.max_new_tokens, measures)
        decoder = decoder_for(self.model, capacity, longest, sampling.max_new_tokens, self.tokenizer.pad_token_id)
        stops = Stops(self.end_ids, sampling, self.tokenizer)
        rows = _Rows.none()
        tokens_B = torch.zeros(0, dtype=torch.long)
        while len(waiting) or len(rows):
            free = capacity - len(rows)
            if len(waiting) and (free >= _REFILL * capacity or not len(rows)):
                taken, waiting = waiting[:free], waiting[free:]
                read, prompt_of_row = np.unique(taken[:, 0], return_inverse=True)
                logits_P_V = decoder.prefill([prompts[index].tokens for index in read])
                new = _Rows.of(prompts, taken, results)
                logits_B_V = logits_P_V[torch.from_numpy(prompt_of_row).to(logits_P_V.device)]
                new_tokens_B, alive_B = self._draw(logits_B_V, new, sampling, stops, results)
                decoder.admit(prompt_of_row[alive_B])
                rows = rows.join(new.take(np.flatnonzero(alive_B)))
                alive_B = torch.from_numpy(alive_B).to(new_tokens_B.device)
                tokens_B = torch.cat([tokens_B.to(new_tokens_B.device), new_tokens_B[alive_B]])
                continue
            tokens_B, alive_B = self._draw(decoder.step(tokens_B), rows, sampling, stops, results)
            if not alive_B.all():
                order = decoder.keep(alive_B)
                rows, tokens_B = rows.take(order), tokens_B[torch.from_numpy(order).to(tokens_B.device)]
        return results

    def _draw(
        self, logits_B_V: Tensor, rows: _Rows, sampling: Sampling, stops: Stops, results: _Results
    ) -> tuple[Tensor, np.ndarray]:
        """The next token of every row, noted in `results`; and which rows go on after it."""
        logp_B_V = log_distribution(logits_B_V, sampling)
        tokens_B, logp_B = draw(logp_B_V, uniforms(rows.keys, rows.drawn))
        measures = [measure(name, logp_B_V) for name in results.measures]
        numbers_N_B = torch.stack([logp_B, *measures]).cpu().numpy()
        if not np.isfinite(numbers_N_B[0]).all():
            raise FloatingPointError(NOT_A_DISTRIBUTION)
        results.note(rows, tokens_B.cpu().numpy(), numbers_N_B)
        rows.drawn += 1
        stopped_B = stops.at_end(results, rows)
        ended_B = stopped_B | (rows.drawn == sampling.max_new_tokens)
        results.close(rows.take(np.flatnonzero(ended_B)), stopped_B[ended_B])
        return tokens_B, ~ended_B


def _uncompiled(model: Any) -> AbstractContextManager[Any]:
    """Decoding changes shape at every step, which a compiled backbone would be compiled anew for."""
    if model.base_model._compiled_call_impl is None:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a completion: the tokenizer's, and those of the model's generation_config.json."""
    config = getattr(model, "generation_config", None)
    more = getattr(config, "eos_token_id", None) or []
    return sorted({tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])})


@dataclass
class _Rows:
    """The samples that are decoded now, as arrays (B,)."""

    keys: np.ndarray  # of their randomness, uint64
    samples: np.ndarray  # which result each is
    lines: np.ndarray  # where its tokens are collected
    drawn: np.ndarray  # tokens drawn so far

    @classmethod
    def none(cls) -> _Rows:
        empty = np.zeros(0, dtype=np.int64)
        return cls(empty.astype(np.uint64), empty, empty, empty)

    @classmethod
    def of(cls, prompts: Sequence[Prompt], taken: np.ndarray, results: _Results) -> _Rows:
        keys = np.array([prompts[prompt].keys[sample] for prompt, sample, _ in taken], dtype=np.uint64)
        return cls(keys, taken[:, 2], results.lines(len(taken)), np.zeros(len(taken), dtype=np.int64))

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, index: np.ndarray) -> _Rows:
        return _Rows(self.keys[index], self.samples[index], self.lines[index], self.drawn[index])

    def join(self, other: _Rows) -> _Rows:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Rows(*(np.concatenate(pair) for pair in pairs))


class _Results:
    """Tokens and numbers of the samples: rows being decoded share `capacity` lines, ended ones become lists."""

    def __init__(self, total: int, capacity: int, limit: int, measures: tuple[str, ...]) -> None:
        self.measures = measures
        self.tokens = np.zeros((capacity, limit), dtype=np.int64)
        self._numbers = np.zeros((1 + len(measures), capacity, limit), dtype=np.float32)
        self._free = list(range(capacity))
        self._ended: list[tuple[list[int], list[list[float]], str]] = [([], [], "")] * total

    def lines(self, count: int) -> np.ndarray:
        """Free lines for `count` new rows."""
        taken, self._free = self._free[:count], self._free[count:]
        return np.array(taken, dtype=np.int64)

    def note(self, rows: _Rows, tokens_B: np.ndarray, numbers_N_B: np.ndarray) -> None:
        """Write down what was drawn as the next token of each row."""
        self.tokens[rows.lines, rows.drawn] = tokens_B
        self._numbers[:, rows.lines, rows.drawn] = numbers_N_B

    def close(self, rows: _Rows, stopped_B: np.ndarray) -> None:
        for sample, line, count, stopped in zip(rows.samples, rows.lines, rows.drawn, stopped_B, strict=True):
            numbers = self._numbers[:, line, :count].tolist()
            self._ended[sample] = (self.tokens[line, :count].tolist(), numbers, "stop" if stopped else "length")
        self._free += rows.lines.tolist()

    def completions(self, version: int) -> Completions:
        measures = {
            name: [numbers[1 + index] for _, numbers, _ in self._ended] for index, name in enumerate(self.measures)
        }
        return Completions(
            [tokens for tokens, _, _ in self._ended],
            [numbers[0] for _, numbers, _ in self._ended],
            [reason for _, _, reason in self._ended],
            version,
            measures,
        )


class Stops:
    """What ends a completion: tokens, and texts wherever the tokens cut them."""

    def __init__(self, ids: Sequence[int], sampling: Sampling, tokenizer: Any) -> None:
        self.ids = np.array(sorted({*ids, *sampling.stop_ids}))
        self.texts, self.tokenizer = sampling.stop, tokenizer
        self._reach = max((len(text.encode()) for text in self.texts), default=0) + 4
        """Tokens that a stop text can reach back, at a byte each; 4 more, as a tail may begin inside a character."""

    def at_end(self, results: _Results, rows: _Rows) -> np.ndarray:
        """stopped_B: whether the newest token of each row ends its completion."""
        stopped_B = np.isin(results.tokens[rows.lines, rows.drawn - 1], self.ids)
        if self.texts:
            lines = zip(rows.lines, rows.drawn, strict=True)
            stopped_B |= self._hold_text([results.tokens[line, :count] for line, count in lines])
        return stopped_B

    def first_end(self, tokens: Sequence[int]) -> int | None:
        """How many of `tokens` make the completion: up to and with what ends it; None when nothing does."""
        ended_T = np.isin(tokens, self.ids)
        if self.texts:
            whole = self.tokenizer.decode(tokens, skip_special_tokens=False)
            if _BROKEN in whole or self._is_in(whole):
                ended_T |= self._hold_text([tokens[:count] for count in range(1, len(tokens) + 1)])
        return int(ended_T.argmax()) + 1 if ended_T.any() else None

    def _hold_text(self, completions: Sequence[Any]) -> np.ndarray:
        """Whether each completion holds a stop text that was not in it before its last token.

        The newest tokens tell, unless they begin inside a character; and bytes that are a character by themselves may
        be none behind those before them. In both cases the whole completion is read.
        """
        tails = self._decoded([tokens[-self._reach :] for tokens in completions])
        held = np.array([self._is_in(tail) for tail in tails], dtype=bool)
        unsure = [index for index, tail in enumerate(tails) if held[index] or tail.startswith(_BROKEN)]
        held[unsure] = [self._is_in(text) for text in self._decoded([completions[index] for index in unsure])]
        return held

    def _is_in(self, text: str) -> bool:
        return any(stop in text for stop in self.texts)

    def _decoded(self, rows: Sequence[Any]) -> list[str]:
        return self.tokenizer.batch_decode(rows, skip_special_tokens=False) if rows else []


def _by_length(prompts: Sequence[Prompt]) -> np.ndarray:
    """(prompt, sample of it, number of the result) of every sample wanted, shortest prompts first."""
    first = np.cumsum([0, *(len(prompt.keys) for prompt in prompts)])
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].tokens))
    wanted = [(index, sample, first[index] + sample) for index in order for sample in range(len(prompts[index].keys))]
    return np.array(wanted, dtype=np.int64).reshape(-1, 3)
