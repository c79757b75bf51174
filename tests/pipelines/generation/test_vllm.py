"""What surrounds vLLM, tested without it: the probe after a load, and the client against a server made of Python."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from pipelines.errors import UserError
from pipelines.generation import vllm_server
from pipelines.generation.engine import Prompt
from pipelines.generation.engines import open_engine
from pipelines.generation.native import NativeEngine
from pipelines.generation.settings import Sampling, VllmEngineParams
from pipelines.generation.vllm_common import Drawn, PlainModel, ProbedEngine, probe_prompts
from pipelines.generation.vllm_server import VllmServerEngine

FLOAT32 = VllmEngineParams(name="vllm", dtype="float32")
SHORT = Sampling(temperature=1.0, max_new_tokens=6)
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2))


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_plain_model_predicts_with_borrowed_weights(make):
    """Llama has a head of its own, GPT-2 a tied one and buffers."""
    torch.manual_seed(0)
    model, other = make().eval(), make().eval()
    with torch.no_grad():
        expected = torch.log_softmax(other(torch.tensor([[3, 4, 5, 6]])).logits[0, 1:3] / 0.7, -1)
    plain = PlainModel(model, SimpleNamespace(eos_token_id=1))
    assert all(parameter.device.type == "meta" for parameter in plain.model.parameters())
    found = plain.logprobs(plain.complete(other.state_dict()), [3, 4], [5, 6], 0.7)
    np.testing.assert_allclose(found, [expected[0, 5], expected[1, 6]], atol=1e-6)


class Pretended(ProbedEngine):
    """The native engine in the place of vLLM; `puts` says what happens to new weights."""

    def __init__(self, world, params: VllmEngineParams = FLOAT32) -> None:
        super().__init__(world.tokenizer, PlainModel(world.make(0), world.tokenizer), params, None)
        self.native = NativeEngine(world.make(0), world.tokenizer)
        self.puts: Callable[[dict[str, torch.Tensor]], None] = lambda weights: self.native.load(weights, 0)
        self.answer = self.stopped = lambda drawn: drawn  # what becomes of a completion, and of one with stop texts

    def _sample(self, requests, options):
        sampling = Sampling(temperature=options["temperature"], max_new_tokens=options["max_tokens"])
        drawn = self.native.generate([Prompt(tokens, (seed,)) for tokens, seed in requests], sampling)
        rows = zip(drawn.tokens, drawn.logprobs, drawn.finish_reasons, strict=True)
        answer = self.stopped if options["stop"] else self.answer
        return [answer(Drawn(*row)) for row in rows]

    def _put(self, weights):
        self.puts(weights)


def moved(world, scale: float) -> dict[str, torch.Tensor]:
    """The weights of the checkpoint with one norm scaled."""
    model = world.make(0)
    with torch.no_grad():
        model.model.norm.weight.mul_(scale)
    return model.state_dict()


def test_weights_that_arrive_are_accepted_and_become_the_version(world):
    engine = Pretended(world)
    engine.load(world.make(1).state_dict(), version=3)
    engine.load(moved(world, 1 + 1e-6), version=4)
    engine.load(moved(world, 1 + 1e-6), version=5)  # nothing changed, so nothing has to move
    assert engine.version == 5


def test_weights_that_did_not_arrive_are_noticed_however_small_the_step(world):
    engine = Pretended(world)
    engine.load(moved(world, 1), version=1)
    engine.puts = lambda weights: None
    with pytest.raises(RuntimeError, match=r"its log-probs are .* nats on average from those of a plain forward pass"):
        engine.load(world.make(1).state_dict(), version=2)
    with pytest.raises(RuntimeError, match=r"the new ones move log-probs by .* those of vLLM did not move at all"):
        engine.load(moved(world, 1.0001), version=2)
    assert engine.version == 1


def test_steps_too_small_to_be_noticed_add_up(world):
    engine = Pretended(world, VllmEngineParams(name="vllm", dtype="bfloat16"))
    engine.load(moved(world, 1), version=0)
    engine.puts = lambda weights: None
    with pytest.raises(RuntimeError, match="did not move at all"):
        for step in range(1, 50):
            engine.load(moved(world, 1 + 2e-5 * step), version=step)
    assert 1 < engine.version < 49


def test_a_half_done_sync_is_noticed(world):
    engine = Pretended(world)
    engine.puts = lambda weights: engine.native.load(
        engine.native.model.state_dict() | {name: weights[name] for name in weights if "layers.1" in name}, 0
    )
    with pytest.raises(RuntimeError, match="does not sample from the weights"):
        engine.load(world.make(1).state_dict(), version=1)


def test_logprobs_before_temperature_are_noticed_and_named(world):
    engine = Pretended(world)
    engine.load(world.model.state_dict(), version=1)
    weights, prompts = engine.plain.complete(world.model.state_dict()), iter(probe_prompts(world.vocabulary))

    def untempered(drawn):
        tokens = drawn.tokens
        return Drawn(tokens, engine.plain.logprobs(weights, next(prompts).tokens, tokens, 1.0), drawn.reason)

    engine.answer = untempered
    with pytest.raises(RuntimeError, match="start it with --logprobs-mode processed_logprobs"):
        engine.load(world.model.state_dict(), version=2)


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_a_copy_of_a_tied_head_that_does_not_follow_is_found_and_given_by_its_name(world, scale):
    """As vLLM keeps one on the CPU; with small weights, as when just made, a model predicts nearly the same always."""

    def scaled(seed: int) -> dict[str, torch.Tensor]:
        return {
            name: scale * tensor if tensor.ndim > 1 else tensor
            for name, tensor in world.make(seed).state_dict().items()
        }

    engine = Pretended(world)
    untied = world.make(5)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
    engine.native.model = untied
    given: list[set[str]] = []

    def put(weights):
        given.append(set(weights))
        untied.load_state_dict(weights, strict=False)

    engine._put = put
    engine.load(scaled(1), version=1)
    engine.load(scaled(2), version=2)
    assert ["lm_head.weight" in names for names in given] == [False, True, True]


def test_a_tied_head_that_follows_is_not_given_by_its_name(world):
    engine = Pretended(world)
    given: list[set[str]] = []
    put = engine.puts
    engine.puts = lambda weights: given.append(set(weights)) or put(weights)
    engine.load(world.make(1).state_dict(), version=1)
    assert ["lm_head.weight" in names for names in given] == [False, False]


def test_a_completion_that_vllm_gave_up_is_no_completion(world):
    engine = Pretended(world)
    engine.answer = lambda drawn: Drawn(drawn.tokens[:2], drawn.logprobs[:2], "abort")
    with pytest.raises(RuntimeError, match=r"after 2 of 6 tokens without an end token \(reason: abort\)"):
        engine.generate([Prompt([20, 21], (1,))], SHORT)


def test_what_comes_behind_a_stop_text_that_vllm_missed_is_cut(world):
    asked = [Prompt([20, 21], tuple(range(30)))]
    sampling = Sampling(temperature=1.0, max_new_tokens=12, stop=["a", "B", "."])
    found = Pretended(world).generate(asked, sampling)
    expected = NativeEngine(world.make(0), world.tokenizer).generate(asked, sampling)
    assert found.tokens == expected.tokens
    assert list(map(len, found.logprobs)) == list(map(len, expected.tokens))
    assert "stop" in found.finish_reasons
    assert found.finish_reasons == expected.finish_reasons


def test_what_vllm_ended_for_a_text_that_is_not_there_is_drawn_again(world):
    asked, sampling = [Prompt([20, 21], (1, 2))], Sampling(temperature=1.0, max_new_tokens=12, stop=["no such text"])
    engine = Pretended(world)
    expected = engine.generate(asked, sampling)
    engine.stopped = lambda drawn: Drawn(drawn.tokens[:3], drawn.logprobs[:3], "stop")
    assert engine.generate(asked, sampling) == expected
    assert [len(tokens) for tokens in expected.tokens] == [12, 12]


def test_measures_of_a_vocabulary_too_large_are_refused(world):
    long = Sampling(temperature=1.0, max_new_tokens=65536)
    engine = Pretended(world)
    engine.plain.vocabulary = 150_000
    with pytest.raises(UserError, match="entropy: vLLM would have to give the probabilities of 150000 tokens"):
        engine.generate([Prompt([20], (1,))], long, measures=("entropy",))


class Server:
    """A vLLM server as far as the client can tell: the native engine behind the same paths."""

    def __init__(self, world, served: Path | None = None) -> None:
        self.native = NativeEngine(world.make(1), world.tokenizer)
        self.served = {"id": "m", "root": str(served or world.directory), "max_model_len": 64}
        self.vocabulary = world.vocabulary
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.drops = 0  # connections to cut before the next answer
        self.answers: dict[str, Callable[[dict[str, Any]], tuple[int, Any]]] = {
            "/v1/models": lambda body: (200, {"data": [self.served]}),
            "/v1/completions": self._complete,
            "/collective_rpc": self._reload,
            "/reset_prefix_cache": lambda body: (200, {"success": True}),
        }

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        if max(body["prompt"]) >= self.vocabulary:
            return 400, {"error": {"message": "Token id is out of vocabulary"}}
        sampling = Sampling(temperature=body.get("temperature", 1.0), max_new_tokens=body["max_tokens"])
        drawn = self.native.generate([Prompt(body["prompt"], (body.get("seed", 0),))], sampling)
        logprobs = {"token_logprobs": drawn.logprobs[0]}
        choice = {"token_ids": drawn.tokens[0], "logprobs": logprobs, "finish_reason": drawn.finish_reasons[0]}
        return 200, {"choices": [choice]}

    def _reload(self, body: dict[str, Any]) -> tuple[int, Any]:
        weights = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        self.native.load(weights, 0)
        return 200, {"results": [None]}


@pytest.fixture
def server(world) -> Iterator[Server]:
    pretended = Server(world)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if pretended.drops:
                pretended.drops -= 1
                return  # closes the connection without an answer
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            pretended.asked.append((self.path, body))
            status, answer = pretended.answers.get(self.path, lambda body: (404, {"detail": "Not Found"}))(body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        do_POST = do_GET

        def log_message(self, *args):
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.handle_error = lambda *args: None  # a client that hung up
    pretended.url = f"http://127.0.0.1:{listening.server_port}"
    threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True).start()
    yield pretended
    listening.shutdown()
    listening.server_close()


def params(server: Server, **more) -> VllmEngineParams:
    return VllmEngineParams(name="vllm", dtype="float32", url=server.url, **more)


def test_opening_a_server_gives_it_the_weights_of_the_checkpoint(server, world, tmp_path):
    engine = open_engine(params(server, shared_dir=str(tmp_path)), world.directory)
    asked = [Prompt([20, 21], (1, 2))]
    assert (
        engine.generate(asked, SHORT).tokens == NativeEngine(world.model, world.tokenizer).generate(asked, SHORT).tokens
    )
    written = Path(dict(server.asked)["/collective_rpc"]["kwargs"]["weights_path"])
    assert written.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_requests_say_all_that_a_server_could_have_other_defaults_for(server, world):
    engine = open_engine(params(server), world.directory)
    engine.generate([Prompt([20, 21], (2**64 - 1,))], Sampling(temperature=0.9, max_new_tokens=3, stop=list("xyzuv")))
    body = server.asked[-1][1]
    assert body == {
        "model": "m",
        "prompt": [20, 21],
        "add_special_tokens": False,
        "seed": (2**64 - 1) % (2**63 - 1),
        "max_tokens": 3,
        "temperature": 0.9,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "stop": ["x", "y", "z", "u"],
        "stop_token_ids": [1, 7],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def test_lost_connections_are_tried_again_a_few_times(server, world, monkeypatch):
    monkeypatch.setattr(vllm_server, "_PAUSES_S", (0.0, 0.0))
    engine = open_engine(params(server), world.directory)
    server.drops = 2
    assert len(engine.generate([Prompt([20], (1,))], SHORT).tokens) == 1
    server.drops = 3
    with pytest.raises(UserError, match=rf"no vLLM server answers at {server.url} .*; start it as docs/vllm.md says"):
        engine.generate([Prompt([20], (1,))], SHORT)


def test_a_server_that_is_not_there_is_said(world, monkeypatch):
    monkeypatch.setattr(vllm_server, "_PAUSES_S", ())
    with pytest.raises(UserError, match=r"no vLLM server answers at http://127.0.0.1:9 "):
        open_engine(VllmEngineParams(name="vllm", url="http://127.0.0.1:9"), world.directory)


@pytest.mark.parametrize(
    ("path", "status", "answer", "error", "message"),
    [
        ("/v1/models", 200, b"<html>", UserError, "is no vLLM server: /v1/models is not JSON"),
        ("/v1/models", 200, {"data": []}, UserError, "is no vLLM server: it names no model and its length"),
        ("/v1/models", 401, {"error": {"message": "no key"}}, UserError, "refuses /v1/models: no key"),
        ("/collective_rpc", 404, {"detail": "Not Found"}, UserError, "start it with VLLM_SERVER_DEV_MODE=1"),
        ("/collective_rpc", 500, {"error": {"message": "broken"}}, RuntimeError, "failed on /collective_rpc: broken"),
        ("/reset_prefix_cache", 200, {"success": False}, RuntimeError, "let no other program use it"),
        ("/collective_rpc", 200, {"results": [None]}, RuntimeError, "does not sample from the weights it was given"),
    ],
)
def test_what_a_server_refuses_or_fails_at_is_said_in_words(server, world, path, status, answer, error, message):
    server.answers[path] = lambda body: (status, answer)
    with pytest.raises(error, match=message):
        open_engine(params(server), world.directory)


def test_a_server_with_another_model_is_refused_before_it_is_given_weights(server, world, tmp_path):
    config = json.loads((world.directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    server.served["root"] = str(tmp_path)
    with pytest.raises(UserError, match=rf"serves {tmp_path} with hidden_size 128, {world.directory} has 64; start it"):
        open_engine(params(server), world.directory)
    server.served["root"] = "somewhere/else"
    server.vocabulary -= 1
    with pytest.raises(UserError, match=rf"whose vocabulary is not the {world.vocabulary} tokens of {world.directory}"):
        open_engine(params(server), world.directory)
    assert "/collective_rpc" not in dict(server.asked)


def test_the_shorter_of_the_lengths_of_server_and_model_is_the_limit(server, world):
    engine = open_engine(params(server), world.directory)
    with pytest.raises(UserError, match="make 65 tokens, the model has 64 positions"):
        engine.generate([Prompt([20] * 59, (1,))], SHORT)


def test_a_server_that_does_not_answer_in_time_is_said(server, world):
    answered = threading.Event()
    server.answers["/v1/models"] = lambda body: (answered.wait(5), (200, {"data": [server.served]}))[1]
    with pytest.raises(RuntimeError, match=r"did not answer /v1/models within 0.2 s; look at its log"):
        open_engine(params(server, timeout_s=0.2), world.directory)
    answered.set()


def test_a_shared_directory_that_is_not_there_is_said(server, world, tmp_path):
    with pytest.raises(UserError, match=f"shared_dir: {tmp_path}/none is no directory; make it"):
        open_engine(params(server, shared_dir=f"{tmp_path}/none"), world.directory)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://host/v1", "ftp://host"])
def test_an_url_is_the_address_of_a_server_alone(url):
    with pytest.raises(ValidationError, match="url"):
        VllmEngineParams(name="vllm", url=url)


def test_a_server_engine_needs_an_url(world):
    with pytest.raises(UserError, match="url is missing"):
        VllmServerEngine.open(world.directory, FLOAT32)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_message_says_how_to_install_it(world):
    with pytest.raises(
        UserError, match=r"vLLM cannot be imported .* for a GPU install it with `pip install vllm==0.32.0`"
    ):
        open_engine(FLOAT32, world.directory)


@needs_vllm
def test_length_and_memory_of_vllm_in_process_can_be_chosen(world):
    engine = open_engine(FLOAT32.model_copy(update={"max_length": 64, "memory_share": 0.15}), world.directory)
    with pytest.raises(UserError, match="make 65 tokens, the model has 64 positions"):
        engine.generate([Prompt([20] * 59, (1,))], SHORT)
    engine.close()
    with pytest.raises(UserError, match=rf"vLLM cannot run the model of {world.directory}: Available memory"):
        open_engine(FLOAT32.model_copy(update={"memory_share": 1.0}), world.directory)


@needs_vllm
def test_a_bfloat16_engine_takes_float32_weights(world):
    params = VllmEngineParams(name="vllm", dtype="bfloat16", memory_share=0.15)
    engine = open_engine(params, world.directory)
    engine.load(world.make(1).state_dict(), version=2)
    assert engine.version == 2
    engine.close()


@needs_vllm
def test_a_real_server_without_development_mode_is_refused(start_server, world, tmp_path):
    with (
        start_server(world.directory, tmp_path, development=False) as url,
        pytest.raises(UserError, match="start it with VLLM_SERVER_DEV_MODE=1"),
    ):
        open_engine(VllmEngineParams(name="vllm", dtype="float32", url=url), world.directory)
