"""What the engines of vLLM have in common: requests, ends, measures, and the check of new weights.

Every load ends with a probe: a few tokens are sampled, and their log-probs must be those of a plain forward pass of
`transformers` with the new weights. Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from pipelines.base.architectures import position_limit
from pipelines.errors import UserError
from pipelines.generation.draw import measure
from pipelines.generation.engine import Completions, Prompt, check_request, fitting_weights, tied_names
from pipelines.generation.native import NOT_A_DISTRIBUTION, Stops, end_ids
from pipelines.generation.settings import Sampling, VllmEngineParams

_SEEDS = 2**63 - 1  # vLLM takes -2^63 to 2^63 - 1, and -1 means no seed
_TEMPERATURES = (0.01, 2.0)  # vLLM refuses higher ones and raises lower ones to this
_PROBED = Sampling(temperature=0.7, max_new_tokens=8)  # not 1, so that log-probs without the temperature are noticed
_ALLOWED_GAP = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.1}  # mean over the probe, in nats
_NOISE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-3}  # a larger change of the weights moves vLLM's log-probs
_TRAINED_SPREAD = 3.0  # standard deviation of logits
_NUMBERS_AT_ONCE = 50_000_000  # of whole distributions that vLLM keeps as Python objects: some 4 GB


class PlainModel:
    """A checkpoint's model in `transformers` without weights of its own: a forward pass borrows them.

    What it keeps of the checkpoint are names, shapes and limits.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        state = model.state_dict()
        self.tied = tied_names(state)
        self.own = {name: tensor.to("meta") for name, tensor in state.items()}
        self.end_ids = end_ids(model, tokenizer)
        self.positions = position_limit(model)
        self.vocabulary = model.config.get_text_config().vocab_size
        self.model = _without_weights(model.eval())

    def complete(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole state dict of `weights`. Raises ValueError when they do not fit the model."""
        fitting = fitting_weights(self.own, weights, self.tied)
        return {name: fitting[self.tied.get(name, name)] for name in self.own}

    @torch.no_grad()
    def logits(self, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
        """logits_T_V behind each of `tokens` under a whole state dict, in float32."""
        device = next(iter(weights.values())).device
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(device)
        ids_1_T = torch.tensor([tokens], device=device)
        arguments = {"input_ids": ids_1_T, "use_cache": False}
        return torch.func.functional_call(self.model, weights, kwargs=arguments).logits[0].float()

    def logprobs(
        self, weights: dict[str, Tensor], prompt: list[int], tokens: list[int], temperature: float
    ) -> list[float]:
        """Natural log-probs of `tokens` behind `prompt` under a whole state dict, one per token."""
        logits_T_V = self.logits(weights, prompt + tokens)[len(prompt) - 1 : -1]
        ids_T = torch.tensor(tokens, device=logits_T_V.device)
        return torch.log_softmax(logits_T_V / temperature, dim=-1).gather(-1, ids_T[:, None])[:, 0].tolist()


@dataclass(frozen=True)
class Drawn:
    """One completion as vLLM gives it; logp_T_V: the whole distributions, when they were asked for."""

    tokens: list[int]
    logprobs: list[float]
    reason: str
    logp_T_V: Tensor | None = None


@dataclass(frozen=True)
class _Completion:
    """One completion as the project wants it."""

    tokens: list[int]
    logprobs: list[float]
    reason: str
    measures: dict[str, list[float]]


@dataclass(frozen=True)
class _Probe:
    """What was sampled after a load: tokens, vLLM's log-probs of them and those of a plain forward pass."""

    tokens: list[list[int]]
    sampled: np.ndarray
    plain: np.ndarray


class ProbedEngine(ABC):
    """What vLLM in this process and a vLLM server share: requests, ends, measures, and the probe after a load."""

    def __init__(self, tokenizer: Any, plain: PlainModel, params: VllmEngineParams, positions: int | None) -> None:
        self.tokenizer, self.plain, self.params, self.positions = tokenizer, plain, params, positions
        self.version = 0
        self._probed: _Probe | None = None
        # whether to give a tied tensor by its second name too; found at a first load
        self._tied_too: bool | None = None

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, measures: Collection[str] = ()) -> Completions:
        """See `pipelines.generation.engine.Engine.generate`.

        Raises UserError too for a temperature that vLLM does not take, and for measures of a vocabulary so large that
        the distributions would not fit into memory.
        """
        check_request(prompts, sampling, measures, self.positions)
        _check_temperature(sampling)
        requests = [(prompt.tokens, key % _SEEDS) for prompt in prompts for key in prompt.keys]
        stops = Stops(self.plain.end_ids, sampling, self.tokenizer)
        options = self._options(sampling, stops, bool(measures))
        at_once = self._requests_at_once(sampling, measures) if measures else max(1, len(requests))
        done: list[_Completion] = []
        for start in range(0, len(requests), at_once):
            drawn = self._sample_to_the_end(requests[start : start + at_once], options, stops)
            done += [_completion(one, count, sampling, measures) for one, count in drawn]
        return Completions(
            [one.tokens for one in done],
            [one.logprobs for one in done],
            [one.reason for one in done],
            self.version,
            {name: [one.measures[name] for one in done] for name in measures},
        )

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See `pipelines.generation.engine.Engine.load`; raises FloatingPointError for weights that predict NaN."""
        complete = self.plain.complete(weights)
        if self._tied_too is None:
            self._tied_too = bool(self.plain.tied) and self._keeps_tied_copies(complete)
        self._put(self._named(complete, self._tied_too))
        self._probe(complete)
        self.version = version

    def _named(self, complete: dict[str, Tensor], tied_too: bool) -> dict[str, Tensor]:
        """The tensors by the names of a checkpoint; `transformers` has others for some, such as those of experts."""
        given = {name: tensor for name, tensor in complete.items() if tied_too or name not in self.plain.tied}
        return revert_weight_conversion(self.plain.model, given)

    def _keeps_tied_copies(self, complete: dict[str, Tensor]) -> bool:
        """Whether vLLM goes on with an older output head when it is given a new embedding that is tied to it.

        It does on the CPU, where it keeps the head in another layout; found by an embedding with its rows moved on, and
        scaled until logits differ as those of a trained model do. Some of its models refuse the name of a tied head,
        so it is given only where this must be.
        """
        prompts = probe_prompts(self.plain.vocabulary)
        spread = self.plain.logits(complete, prompts[0].tokens).std()
        scale = max(1.0, _TRAINED_SPREAD / float(spread))
        tied = {*self.plain.tied, *self.plain.tied.values()}
        moved = {name: scale * tensor.roll(1, 0) if name in tied else tensor for name, tensor in complete.items()}
        self._put(self._named(moved, tied_too=False))
        drawn = self.generate(prompts, _PROBED)
        plain = self._plain_logprobs(moved, prompts, drawn, _PROBED.temperature)
        return _gap(drawn, plain) > _ALLOWED_GAP[self.params.dtype]

    def _sample_to_the_end(
        self, requests: Sequence[tuple[list[int], int]], options: dict[str, Any], stops: Stops
    ) -> list[tuple[Drawn, int | None]]:
        """What vLLM draws, and how many tokens of it make the completion; None when nothing ends it.

        vLLM decodes token by token, so it sees texts in bytes that are no characters where they stand. Completions that
        it ended for such a text are drawn again without stop texts: the same seed gives the same tokens.
        """
        drawn = self._sample(requests, options)
        counts = [stops.first_end(one.tokens) for one in drawn]
        too_early = [index for index, one in enumerate(drawn) if one.reason == "stop" and counts[index] is None]
        if too_early and options["stop"]:
            again = self._sample([requests[index] for index in too_early], options | {"stop": []})
            for index, one in zip(too_early, again, strict=True):
                drawn[index], counts[index] = one, stops.first_end(one.tokens)
        return list(zip(drawn, counts, strict=True))

    @abstractmethod
    def _sample(self, requests: Sequence[tuple[list[int], int]], options: dict[str, Any]) -> list[Drawn]:
        """One completion per (prompt tokens, seed); options: keyword arguments of vLLM's sampling."""

    @abstractmethod
    def _put(self, weights: dict[str, Tensor]) -> None:
        """Make vLLM sample from `weights`, and forget keys and values of older ones."""

    def _requests_at_once(self, sampling: Sampling, measures: Collection[str]) -> int:
        numbers = self.plain.vocabulary * sampling.max_new_tokens
        if numbers > _NUMBERS_AT_ONCE:
            raise UserError(
                f"{', '.join(measures)}: vLLM would have to give the probabilities of {self.plain.vocabulary} tokens "
                f"at each of {sampling.max_new_tokens} places; measure with the native engine or lower max_new_tokens"
            )
        return _NUMBERS_AT_ONCE // numbers

    def _options(self, sampling: Sampling, stops: Stops, whole_distributions: bool) -> dict[str, Any]:
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_new_tokens,
            "logprobs": -1 if whole_distributions else 0,
            "stop": sampling.stop,
            "stop_token_ids": [int(token) for token in stops.ids if token < self.plain.vocabulary],
            "ignore_eos": True,  # the end tokens are among the stop tokens
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }

    def _distributions(self, places: Iterable[tuple[Sequence[int], Sequence[float]]]) -> Tensor:
        """logp_T_V of (token ids, log-probs) per place."""
        rows = []
        for ids, values in places:
            logp_V = torch.full((self.plain.vocabulary,), -torch.inf)
            logp_V[torch.tensor(ids)] = torch.tensor(values)
            rows.append(logp_V)
        return torch.stack(rows)

    def _format(self, tensor: Tensor) -> torch.dtype:
        """The number format that vLLM holds a tensor in."""
        return getattr(torch, self.params.dtype) if tensor.is_floating_point() else tensor.dtype

    def _probe(self, weights: dict[str, Tensor]) -> None:
        """Raise RuntimeError unless vLLM samples from `weights`, a whole state dict."""
        prompts = probe_prompts(self.plain.vocabulary)
        drawn = self.generate(prompts, _PROBED)
        plain = self._plain_logprobs(weights, prompts, drawn, _PROBED.temperature)
        if not np.isfinite(plain).all():
            raise FloatingPointError(NOT_A_DISTRIBUTION)
        if (gap := _gap(drawn, plain)) > _ALLOWED_GAP[self.params.dtype]:
            untempered = self._plain_logprobs(weights, prompts, drawn, 1.0)
            raise RuntimeError(self._gap_message(gap, _gap(drawn, untempered)))
        now = _Probe(drawn.tokens, np.concatenate(drawn.logprobs), plain)
        before = self._probed
        if before is None or before.tokens != now.tokens or not np.array_equal(before.sampled, now.sampled):
            self._probed = now  # else `before` is kept, so that changes too small to be seen add up
        elif (moved := float(np.abs(before.plain - plain).max())) > _NOISE[self.params.dtype]:
            raise RuntimeError(
                f"vLLM still samples from older weights: the new ones move log-probs by {moved:.2g} nats, those of "
                "vLLM did not move at all; restart it, and check that its release is one that docs/vllm.md names"
            )

    def _plain_logprobs(
        self, weights: dict[str, Tensor], prompts: Sequence[Prompt], drawn: Completions, temperature: float
    ) -> np.ndarray:
        pairs = zip(prompts, drawn.tokens, strict=True)
        return np.concatenate(
            [self.plain.logprobs(weights, prompt.tokens, tokens, temperature) for prompt, tokens in pairs]
        )

    def _gap_message(self, gap: float, gap_without_temperature: float) -> str:
        allowed = _ALLOWED_GAP[self.params.dtype]
        if gap_without_temperature <= allowed:
            return (
                "vLLM gives log-probs of the distribution before temperature, top_p and top_k; start it with "
                "--logprobs-mode processed_logprobs"
            )
        return (
            f"vLLM does not sample from the weights it was given: its log-probs are {gap:.2g} nats on average from "
            f"those of a plain forward pass, {allowed:.2g} is allowed for {self.params.dtype}. It still has older "
            "weights, or runs another model or number format; restart it with this checkpoint"
        )


def _completion(drawn: Drawn, count: int | None, sampling: Sampling, measures: Collection[str]) -> _Completion:
    """The first `count` tokens, which something ends, or all of them up to the limit."""
    if count is None and len(drawn.tokens) != sampling.max_new_tokens:
        raise RuntimeError(
            f"vLLM ended a completion after {len(drawn.tokens)} of {sampling.max_new_tokens} tokens "
            f"without an end token (reason: {drawn.reason}); look at its log"
        )
    logprobs = drawn.logprobs[:count]
    if not np.isfinite(logprobs).all():
        raise FloatingPointError(NOT_A_DISTRIBUTION)
    found = {name: measure(name, drawn.logp_T_V[:count]).tolist() for name in measures}
    return _Completion(drawn.tokens[:count], logprobs, "length" if count is None else "stop", found)


def _check_temperature(sampling: Sampling) -> None:
    lowest, highest = _TEMPERATURES
    if not lowest <= sampling.temperature <= highest:
        raise UserError(
            f"sampling.temperature is {sampling.temperature:g}; vLLM takes {lowest:g} to {highest:g}. "
            "Choose one of these, or the native engine"
        )


def _gap(drawn: Completions, plain: np.ndarray) -> float:
    """Mean distance of vLLM's log-probs from those of a plain forward pass, in nats."""
    return float(np.abs(np.concatenate(drawn.logprobs) - plain).mean())


def probe_prompts(vocabulary: int) -> list[Prompt]:
    """Four prompts of four tokens from all over the vocabulary, each with one key."""
    return [Prompt([(3 + 7919 * (4 * row + place)) % vocabulary for place in range(4)], (row,)) for row in range(4)]


def _without_weights(model: Any) -> Any:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.to("meta"), requires_grad=False))
    return model


def shorter_length(one: int | None, other: int | None) -> int | None:
    """The shorter of two lengths; None is no limit."""
    return min((limit for limit in (one, other) if limit is not None), default=None)
