"""The native engine: PyTorch, a key/value cache, prefill shared by the samples of a prompt, no finished rows.

Works with any causal language model of `transformers` that takes a `DynamicCache`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipelines.base.architectures import position_limit
from pipelines.errors import UserError
from pipelines.generation.engine import Completions, Prompt
from pipelines.generation.randomness import uniforms
from pipelines.generation.settings import Sampling

_COMPACT_BELOW = 0.75  # share of unfinished rows; dropping the others copies the cache, so it waits until it pays


class NativeEngine:
    """Samples from a `transformers` model in this process.

    model: a causal language model; the engine samples from its parameters as they are at the call.
    end_ids: tokens that end a completion. pad_id: any valid token id. rows: samples decoded side by side at the most.
    """

    def __init__(self, model: torch.nn.Module, end_ids: Sequence[int], pad_id: int, rows: int = 512):
        self.model, self.end_ids, self.pad_id, self.rows = model, sorted(set(end_ids)), pad_id, rows
        self.version = 0

    @classmethod
    def open(cls, directory: Path) -> NativeEngine:
        """An engine for a checkpoint directory."""
        from pipelines.base.architectures import load_model, load_tokenizer

        tokenizer = load_tokenizer(directory)
        return cls(load_model(directory), [tokenizer.eos_token_id], tokenizer.pad_token_id)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        own = self.model.state_dict()
        if own.keys() != weights.keys():
            raise ValueError(
                f"these weights do not fit the model: differing names {sorted(own.keys() ^ weights.keys())[:5]}"
            )
        for name, tensor in weights.items():
            if own[name].shape != tensor.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, the engine's model wants {tuple(own[name].shape)}"
                )
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        self.version = version

    def close(self) -> None:
        del self.model

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Completions:
        longest = max((len(prompt.tokens) for prompt in prompts), default=0) + sampling.max_new_tokens
        limit = position_limit(self.model)
        if limit is not None and longest > limit:
            raise UserError(
                f"the longest prompt and sampling.max_new_tokens ({sampling.max_new_tokens}) make {longest} tokens, "
                f"the model has {limit} positions; lower max_new_tokens"
            )
        total = sum(len(prompt.keys) for prompt in prompts)
        tokens: list[list[int]] = [[] for _ in range(total)]
        logprobs: list[list[float]] = [[] for _ in range(total)]
        reasons = ["length"] * total
        training = self.model.training
        self.model.eval()
        for chunk, first_rows in _chunks(prompts, self.rows):
            for row, row_tokens, row_logprobs, reason in self._decode(chunk, first_rows, sampling):
                tokens[row], logprobs[row], reasons[row] = row_tokens, row_logprobs, reason
        self.model.train(training)
        return Completions(tokens, logprobs, reasons, self.version)

    def _decode(
        self, prompts: list[Prompt], first_rows: list[int], sampling: Sampling
    ) -> Iterator[tuple[int, list[int], list[float], str]]:
        device = next(self.model.parameters()).device
        logits_P_V, cache, lengths_P = self._prefill([prompt.tokens for prompt in prompts], device)
        repeats_P = torch.tensor([len(prompt.keys) for prompt in prompts], device=device)
        prompt_B = torch.arange(len(prompts), device=device).repeat_interleave(repeats_P)
        cache.batch_select_indices(prompt_B)
        logits_B_V, lengths_B = logits_P_V[prompt_B], lengths_P[prompt_B]
        width = int(lengths_P.max())
        columns = torch.arange(width, device=device)
        mask_B_T = (columns >= width - lengths_B[:, None]).long()

        keys_B = np.array([key for prompt in prompts for key in prompt.keys], dtype=np.uint64)
        rows_B = np.array(
            [first + i for prompt, first in zip(prompts, first_rows, strict=True) for i in range(len(prompt.keys))]
        )
        count, limit = len(keys_B), sampling.max_new_tokens
        tokens_R_L = np.zeros((count, limit), dtype=np.int64)
        logprobs_R_L = np.zeros((count, limit), dtype=np.float32)
        lengths_R = np.full(count, limit)
        stopped_R = np.zeros(count, dtype=bool)
        row_B = np.arange(count)  # which result row each row of the shrinking batch is
        alive_B = np.ones(count, dtype=bool)

        for position in range(limit):
            drawn_B, logp_B = draw(logits_B_V, uniforms(keys_B[row_B], position), sampling.temperature)
            tokens_R_L[row_B, position] = drawn_B.cpu().numpy()
            logprobs_R_L[row_B, position] = logp_B.cpu().numpy()
            ended_B = alive_B & np.isin(tokens_R_L[row_B, position], self.end_ids)
            stopped_R[row_B[ended_B]] = True
            lengths_R[row_B[ended_B]] = position + 1
            alive_B = alive_B & ~ended_B
            if position + 1 == limit or not alive_B.any():
                break
            if alive_B.mean() < _COMPACT_BELOW:
                keep = torch.from_numpy(np.flatnonzero(alive_B)).to(device)
                cache.batch_select_indices(keep)
                drawn_B, mask_B_T, lengths_B = drawn_B[keep], mask_B_T[keep], lengths_B[keep]
                row_B, alive_B = row_B[alive_B], alive_B[alive_B]
            mask_B_T = torch.cat([mask_B_T, mask_B_T.new_ones(len(mask_B_T), 1)], dim=1)
            logits_B_V = self.model(
                input_ids=drawn_B[:, None],
                attention_mask=mask_B_T,
                position_ids=(lengths_B + position)[:, None],
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]

        for index, row in enumerate(rows_B):
            end = lengths_R[index]
            reason = "stop" if stopped_R[index] else "length"
            yield int(row), tokens_R_L[index, :end].tolist(), logprobs_R_L[index, :end].tolist(), reason

    def _prefill(self, prompts: list[list[int]], device: torch.device):
        from transformers import DynamicCache

        lengths = [len(tokens) for tokens in prompts]
        width = max(lengths)
        tokens_P_T = torch.tensor([[self.pad_id] * (width - len(tokens)) + tokens for tokens in prompts], device=device)
        lengths_P = torch.tensor(lengths, device=device)
        mask_P_T = (torch.arange(width, device=device) >= width - lengths_P[:, None]).long()
        cache = DynamicCache()
        logits_P_V = self.model(
            input_ids=tokens_P_T,
            attention_mask=mask_P_T,
            position_ids=(mask_P_T.cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits_P_V, cache, lengths_P


def draw(logits_B_V: Tensor, uniforms_B: np.ndarray, temperature: float) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling from softmax(logits / temperature).

    Returns the token ids (B,) and their natural log-probs (B,), computed in float32. The token is the first whose
    cumulative probability exceeds the uniform; rounding at the top end falls back to the likeliest token.
    """
    logp_B_V = torch.log_softmax(logits_B_V.float() / temperature, dim=-1)
    cdf_B_V = logp_B_V.exp().cumsum(dim=-1)
    u_B = torch.from_numpy(uniforms_B.astype(np.float32)).to(logits_B_V.device)
    tokens_B = (cdf_B_V <= u_B[:, None]).sum(dim=-1)
    tokens_B = torch.where(tokens_B < logp_B_V.shape[-1], tokens_B, logp_B_V.argmax(dim=-1))
    return tokens_B, logp_B_V.gather(-1, tokens_B[:, None])[:, 0]


def _chunks(prompts: Sequence[Prompt], rows: int) -> Iterator[tuple[list[Prompt], list[int]]]:
    """Prompts in order of length, cut so that a chunk has at most `rows` samples, each with its first result row."""
    first_rows = np.concatenate([[0], np.cumsum([len(prompt.keys) for prompt in prompts])])
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].tokens))
    chunk: list[int] = []
    filled = 0
    for index in order:
        if not prompts[index].tokens:
            raise ValueError("a prompt without tokens cannot be sampled from")
        if chunk and filled + len(prompts[index].keys) > rows:
            yield [prompts[i] for i in chunk], [int(first_rows[i]) for i in chunk]
            chunk, filled = [], 0
        chunk.append(index)
        filled += len(prompts[index].keys)
    if chunk:
        yield [prompts[i] for i in chunk], [int(first_rows[i]) for i in chunk]
