"""A vLLM server as an engine, and the client that asks it. docs/vllm.md says how to start one.

Legend: T tokens, V vocabulary.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from pipelines.base.architectures import load_model, load_tokenizer, policy_config
from pipelines.errors import UserError
from pipelines.generation.native import NOT_A_DISTRIBUTION
from pipelines.generation.settings import VllmEngineParams
from pipelines.generation.vllm_common import Drawn, PlainModel, ProbedEngine, shorter_length

_IN_FLIGHT = 128  # requests to a server at a time
_STOP_TEXTS = 4  # that a server takes in one request; the others are looked for here alone
_PAUSES_S = (0.2, 1.0, 5.0)  # before trying a lost connection again
_SMALLEST_LOGP = -9999.0  # what a server writes for minus infinity
_DIMENSIONS = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")


class VllmServerEngine(ProbedEngine):
    """A vLLM server that was started beside this process, with VLLM_SERVER_DEV_MODE=1 so that it takes new weights."""

    def __init__(
        self, server: _Server, name: str, positions: int, tokenizer: Any, plain: PlainModel, params: VllmEngineParams
    ) -> None:
        super().__init__(tokenizer, plain, params, shorter_length(plain.positions, positions))
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

    def _sample(self, requests: Sequence[tuple[list[int], int]], options: dict[str, Any]) -> list[Drawn]:
        neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        common = options | neutral | {"return_token_ids": True, "return_tokens_as_token_ids": True}
        common["stop"] = options["stop"][:_STOP_TEXTS]

        def sample(request: tuple[list[int], int]) -> Drawn:
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

    def _drawn(self, choice: dict[str, Any], whole_distributions: bool) -> Drawn:
        logp_T_V = None
        if whole_distributions:
            places = choice["logprobs"]["top_logprobs"]
            logp_T_V = self._distributions(
                [([int(token.removeprefix("token_id:")) for token in place], list(place.values())) for place in places]
            )
            logp_T_V.masked_fill_(logp_T_V <= _SMALLEST_LOGP, -torch.inf)
        return Drawn(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"], logp_T_V)

    def _put(self, weights: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory(prefix="ratchet-weights-", dir=self.params.shared_dir) as directory:
            tensors = {  # copies, as safetensors refuses tensors that two names share
                name: tensor.to("cpu", self._format(tensor), copy=True).contiguous() for name, tensor in weights.items()
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
