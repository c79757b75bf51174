"""vLLM as an engine: in this process, or as a server beside it. docs/vllm.md says how to install and start it.

Every load ends with a probe: a few tokens are sampled, and their log-probs must be those of a plain forward pass of
`transformers` with the new weights. Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import gc
import http.client
import json
import os
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from pipelines.base.architectures import (
    failures_said_as,
    load_model,
    load_tokenizer,
    policy_config,
    position_limit,
)
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
_IN_FLIGHT = 128  # requests to a server at a time
_STOP_TEXTS = 4  # that a server takes in one request; the others are looked for here alone
_PAUSES_S = (0.2, 1.0, 5.0)  # before trying a lost connection again
_SMALLEST_LOGP = -9999.0  # what a server writes for minus infinity
_DIMENSIONS = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")


def open_vllm(directory: Path, params: VllmEngineParams) -> VllmEngine | VllmServerEngine:
    """The engine that `params` describes for a checkpoint directory: a server if they name one."""
    return (VllmServerEngine if params.url else VllmEngine).open(directory, params)


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
class _Drawn:
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


class _ProbedEngine(ABC):
    """What vLLM in this process and a vLLM server share: requests, ends, measures, and the probe after a load."""

    def __init__(self, tokenizer: Any, plain: PlainModel, params: VllmEngineParams, positions: int | None) -> None:
        self.tokenizer, self.plain, self.params, self.positions = tokenizer, plain, params, positions
        self.version = 0
        self._probed: _Probe | None = None
        self._tied_too: bool | None = (
            None  # whether to give a tied tensor by its second name too; found at a first load
        )

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
        prompts = _probe_prompts(self.plain.vocabulary)
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
    ) -> list[tuple[_Drawn, int | None]]:
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
    def _sample(self, requests: Sequence[tuple[list[int], int]], options: dict[str, Any]) -> list[_Drawn]:
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

    def _probe(self, weights: dict[str, Tensor]) -> None:
        """Raise RuntimeError unless vLLM samples from `weights`, a whole state dict."""
        prompts = _probe_prompts(self.plain.vocabulary)
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


class VllmEngine(_ProbedEngine):
    """vLLM in this process."""

    def __init__(self, llm: Any, tokenizer: Any, plain: PlainModel, params: VllmEngineParams) -> None:
        super().__init__(tokenizer, plain, params, _lower(plain.positions, params.max_length))
        self.llm = llm

    @classmethod
    def open(cls, directory: Path, params: VllmEngineParams | None = None) -> VllmEngine:
        """An engine for a checkpoint directory. Raises UserError when vLLM is not installed or cannot run the model."""
        params = params or VllmEngineParams(name="vllm")
        llm_class = _llm_class()
        tokenizer, model = load_tokenizer(directory), load_model(directory)
        weights, plain = model.state_dict(), PlainModel(model, tokenizer)
        with failures_said_as(f"vLLM cannot run the model of {directory}"):
            llm = llm_class(
                str(directory),
                dtype=params.dtype,
                max_model_len=params.max_length,
                gpu_memory_utilization=params.memory_share,
                generation_config="vllm",  # no defaults of the checkpoint: every option is given with the request
                logprobs_mode="processed_logprobs",
                max_logprobs=-1,
                disable_log_stats=True,
                **({} if torch.cuda.is_available() else _cpu_options(_lower(plain.positions, params.max_length))),
            )
        engine = cls(llm, tokenizer, plain, params)
        try:
            engine._probe(plain.complete(weights))
        except BaseException:
            engine.close()
            raise
        return engine

    def close(self) -> None:
        """Free the memory that vLLM holds."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _sample(self, requests: Sequence[tuple[list[int], int]], options: dict[str, Any]) -> list[_Drawn]:
        from vllm import SamplingParams

        drawn = self.llm.generate(
            [{"prompt_token_ids": tokens} for tokens, _ in requests],
            [
                SamplingParams(seed=seed, flat_logprobs=True, detokenize=bool(options["stop"]), **options)
                for _, seed in requests
            ],
            use_tqdm=False,
        )
        return [self._drawn(request.outputs[0], options["logprobs"] == -1) for request in drawn]

    def _drawn(self, output: Any, whole_distributions: bool) -> _Drawn:
        flat = output.logprobs
        logp_T_V = None
        if whole_distributions:
            places = [slice(*ends) for ends in zip(flat.start_indices, flat.end_indices, strict=True)]
            logp_T_V = _distributions(
                self.plain.vocabulary, [(flat.token_ids[place], flat.logprobs[place]) for place in places]
            )
        return _Drawn(
            list(output.token_ids),
            [flat.logprobs[first] for first in flat.start_indices],
            output.finish_reason,
            logp_T_V,
        )

    def _put(self, weights: dict[str, Tensor]) -> None:
        # once for all weights: every call ends with a pass that makes them ready for use
        dtype = getattr(torch, self.params.dtype)
        tensors = ((name, tensor.to(_format(tensor, dtype))) for name, tensor in weights.items())
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        except Exception as error:  # which one it is depends on the model and on vLLM's release
            raise RuntimeError(
                f"vLLM could not take the new weights, and is of no use any more: {shorten(str(error), 300)}"
            ) from error
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept keys and values of older weights: its prefix cache could not be emptied")


class VllmServerEngine(_ProbedEngine):
    """A vLLM server that was started beside this process, with VLLM_SERVER_DEV_MODE=1 so that it takes new weights."""

    def __init__(
        self, server: _Server, name: str, positions: int, tokenizer: Any, plain: PlainModel, params: VllmEngineParams
    ) -> None:
        super().__init__(tokenizer, plain, params, _lower(plain.positions, positions))
        self.server, self.name = server, name

    @classmethod
    def open(cls, directory: Path, params: VllmEngineParams) -> VllmServerEngine:
        """An engine for a checkpoint directory: the server at params.url gets the checkpoint's weights.

        Raises UserError when no server answers, it serves another model, or is not in development mode.
        """
        if params.url is None:
            raise UserError("url is missing: name the vLLM server, such as http://127.0.0.1:8000")
        if params.shared_dir is not None and not Path(params.shared_dir).is_dir():
            raise UserError(f"shared_dir: {params.shared_dir} is no directory; make it, or leave it out")
        server = _Server(params.url, params.timeout_s)
        served = _served_model(server)
        tokenizer, model = load_tokenizer(directory), load_model(directory)
        weights, plain = model.state_dict(), PlainModel(model, tokenizer)
        engine = cls(server, served["id"], served["max_model_len"], tokenizer, plain, params)
        _refuse_other_model(served["root"], directory, params.url)
        engine._refuse_other_vocabulary(directory)
        engine.load(weights, version=0)
        return engine

    def close(self) -> None:
        """Nothing: the server goes on running."""

    def _sample(self, requests: Sequence[tuple[list[int], int]], options: dict[str, Any]) -> list[_Drawn]:
        neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        common = options | neutral | {"return_token_ids": True, "return_tokens_as_token_ids": True}
        common["stop"] = options["stop"][:_STOP_TEXTS]

        def sample(request: tuple[list[int], int]) -> _Drawn:
            tokens, seed = request
            answer = self._complete(common | {"prompt": tokens, "seed": seed})
            return self._drawn(answer["choices"][0], options["logprobs"] == -1)

        workers = ThreadPoolExecutor(min(_IN_FLIGHT, len(requests)))
        try:
            return list(workers.map(sample, requests))
        finally:
            workers.shutdown(cancel_futures=True)

    def _complete(self, body: dict[str, Any]) -> Any:
        return self.server.post("/v1/completions", {"model": self.name, "add_special_tokens": False} | body)

    def _drawn(self, choice: dict[str, Any], whole_distributions: bool) -> _Drawn:
        logp_T_V = None
        if whole_distributions:
            logp_T_V = _distributions(
                self.plain.vocabulary,
                [
                    ([int(token.removeprefix("token_id:")) for token in place], list(place.values()))
                    for place in choice["logprobs"]["top_logprobs"]
                ],
            )
        return _Drawn(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"], logp_T_V)

    def _put(self, weights: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        dtype = getattr(torch, self.params.dtype)
        with tempfile.TemporaryDirectory(prefix="ratchet-weights-", dir=self.params.shared_dir) as directory:
            tensors = {  # copies, as safetensors refuses tensors that two names share
                name: tensor.to("cpu", _format(tensor, dtype), copy=True).contiguous()
                for name, tensor in weights.items()
            }
            save_file(tensors, Path(directory) / "model.safetensors")
            self.server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": directory}})
        if not self.server.post("/reset_prefix_cache")["success"]:
            raise RuntimeError(
                f"the vLLM server at {self.server.url} kept keys and values of older weights: it is answering "
                "somebody else's requests; let no other program use it"
            )

    def _refuse_other_vocabulary(self, directory: Path) -> None:
        """A server refuses a prompt with a token behind its last one."""
        size = self.plain.vocabulary
        known = [self._takes_token(size - 1), self._takes_token(size)]
        if known != [True, False]:
            raise UserError(
                f"the vLLM server at {self.server.url} serves {self.name}, whose vocabulary is not the {size} tokens "
                f"of {directory}; start it with this checkpoint"
            )

    def _takes_token(self, token: int) -> bool:
        try:
            self._complete({"prompt": [token], "max_tokens": 1})
        except UserError:
            return False
        return True


class _Server:
    """Requests in JSON to one server, tried again when a connection is lost: every one of them can be repeated."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str) -> Any:
        """The answer to GET; raises as `post` does."""
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer to POST.

        Raises UserError when no server answers, it refuses the request, or does not know the path; RuntimeError when it
        fails or takes longer than timeout_s.
        """
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body or {}).encode()
        return self._ask(urllib.request.Request(self.url + path, data, headers, method="POST"))

    def _ask(self, request: urllib.request.Request) -> Any:
        for pause_s in (*_PAUSES_S, None):
            try:
                with self._opener.open(request, timeout=self.timeout_s) as response:
                    body = response.read()
                return json.loads(body) if body else None
            except urllib.error.HTTPError as error:
                raise self._refusal(request.selector, error) from None
            except TimeoutError:
                raise RuntimeError(
                    f"the vLLM server at {self.url} did not answer {request.selector} within {self.timeout_s:g} s; "
                    "look at its log, or raise timeout_s"
                ) from None
            except ValueError:
                raise UserError(
                    f"what answers at {self.url} is no vLLM server: {request.selector} is not JSON"
                ) from None
            except (urllib.error.URLError, ConnectionError, http.client.HTTPException) as error:
                if pause_s is None:
                    raise UserError(
                        f"no vLLM server answers at {self.url} ({error}); start it as docs/vllm.md says, or mend url"
                    ) from error
                time.sleep(pause_s)
        raise AssertionError

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> Exception:
        said = _message(error.read())
        if error.code == http.HTTPStatus.NOT_FOUND and not path.startswith("/v1/"):
            return UserError(
                f"the vLLM server at {self.url} takes no new weights: it knows no {path}; "
                "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        if "not JSON compliant" in said:  # how it says that a log-prob is NaN
            return FloatingPointError(NOT_A_DISTRIBUTION)
        if error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
            return UserError(f"the vLLM server at {self.url} refuses {path}: {said}")
        return RuntimeError(f"the vLLM server at {self.url} failed on {path}: {said}; look at its log and restart it")


def _completion(drawn: _Drawn, count: int | None, sampling: Sampling, measures: Collection[str]) -> _Completion:
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


def _distributions(vocabulary: int, places: Iterable[tuple[Sequence[int], Sequence[float]]]) -> Tensor:
    """logp_T_V of (token ids, log-probs) per place."""
    rows = []
    for ids, values in places:
        logp_V = torch.full((vocabulary,), -torch.inf)
        logp_V[torch.tensor(ids)] = torch.tensor(values)
        rows.append(logp_V.masked_fill_(logp_V <= _SMALLEST_LOGP, -torch.inf))
    return torch.stack(rows)


def _gap(drawn: Completions, plain: np.ndarray) -> float:
    """Mean distance of vLLM's log-probs from those of a plain forward pass, in nats."""
    return float(np.abs(np.concatenate(drawn.logprobs) - plain).mean())


def _probe_prompts(vocabulary: int) -> list[Prompt]:
    """Four prompts of four tokens from all over the vocabulary, each with one key."""
    return [Prompt([(3 + 7919 * (4 * row + place)) % vocabulary for place in range(4)], (row,)) for row in range(4)]


def _without_weights(model: Any) -> Any:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.to("meta"), requires_grad=False))
    return model


def _format(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype


def _lower(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)


def _llm_class() -> Any:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in a process of its own it could not be handed tensors
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns once per token of text that it cannot decode
    try:
        from vllm import LLM
    except ImportError as error:
        raise UserError(
            f"vLLM cannot be imported ({error}); for a GPU install it with `pip install vllm==0.32.0` and the project "
            "again, for a CPU as docs/vllm.md says, or choose the native engine"
        ) from error
    return LLM


def _cpu_options(longest: int | None) -> dict[str, Any]:
    """vLLM 0.32 cannot read a prompt in parts on the CPU when its sample has a seed; compiling takes it minutes."""
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(4096, longest or 0),
    }


def _served_model(server: _Server) -> dict[str, Any]:
    answer = server.get("/v1/models")
    try:
        model = answer["data"][0]
        return {name: model[name] for name in ("id", "root", "max_model_len")}
    except (KeyError, IndexError, TypeError):
        raise UserError(f"what answers at {server.url} is no vLLM server: it names no model and its length") from None


def _refuse_other_model(served: str, directory: Path, url: str) -> None:
    """Compare with what the server was started with, when that is a directory that is visible here too."""
    if not (Path(served) / "config.json").is_file():
        return
    theirs, ours = policy_config(Path(served)), policy_config(directory)
    for name in _DIMENSIONS:
        if theirs.get(name) != ours.get(name):
            raise UserError(
                f"the vLLM server at {url} serves {served} with {name} {theirs.get(name)}, {directory} has "
                f"{ours.get(name)}; start it with this checkpoint"
            )


def _message(body: bytes) -> str:
    """What a refusal says, in vLLM's or FastAPI's form, or as plain text."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
        text = str(found["error"]["message"] if "error" in found else found["detail"])
    except (ValueError, KeyError, TypeError):
        pass
    return shorten(text, 300)
