"""The checkpoint that every engine is tested with, and one opened engine of each kind."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.tiny import tiny_qwen3

if importlib.util.find_spec("vllm"):
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling vLLM's helpers takes 15 s and gains nothing here

ENGINES = ("native", "vllm", "vllm-server")
_POSITIONS, _EXTRA_END = 256, 7
_MEMORY_SHARE = 0.15  # of this machine, for everything that the process holds
_SERVER_STARTS_IN_S = 180


@dataclass(frozen=True)
class World:
    """A tiny Qwen3 checkpoint on disk, and its parts. vLLM's attention on the CPU wants heads of 32 numbers or more."""

    directory: Path
    tokenizer: Any
    model: Any  # what the checkpoint holds
    make: Callable[[int], Any]  # seed -> a model of the same shape with other weights

    @property
    def vocabulary(self) -> int:
        return self.model.config.vocab_size


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> World:

    from pipelines.base.architectures import save_checkpoint
    from pipelines.base.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(("apple", "pear"), _POSITIONS)

    def make(seed: int) -> Any:
        model = tiny_qwen3(
            seed,
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=96,
            head_dim=64,
            max_position_embeddings=_POSITIONS,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.15,
        ).eval()
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, _EXTRA_END]
        return model

    directory = tmp_path_factory.mktemp("world") / "checkpoint"
    model = make(0)
    save_checkpoint(model, tokenizer, directory)
    return World(directory, tokenizer, model, make)


@pytest.fixture(scope="module", params=ENGINES)
def opened(request, world, tmp_path_factory) -> Iterator[Any]:
    """An engine of each kind; starting vLLM takes half a minute, so one serves all tests of a module."""
    if request.param != "native" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; `make test-vllm` installs its CPU build and runs these tests with it")
    with _OPEN[request.param](world, tmp_path_factory.mktemp("logs")) as engine:
        engine.kind = request.param
        yield engine


@pytest.fixture
def engine(opened, world) -> Iterator[Any]:
    """An engine that samples from the checkpoint's weights."""
    yield opened
    if opened.version != 0:
        opened.load(world.model.state_dict(), version=0)


@contextmanager
def _native(world: World, logs: Path) -> Iterator[Any]:
    from pipelines.generation.native import NativeEngine

    yield NativeEngine.open(world.directory)


@contextmanager
def _in_process(world: World, logs: Path) -> Iterator[Any]:
    from pipelines.generation.engines import open_engine
    from pipelines.generation.settings import VllmEngineParams

    params = VllmEngineParams(name="vllm", dtype="float32", memory_share=_MEMORY_SHARE)
    engine = open_engine(params, world.directory)
    yield engine
    engine.close()


@contextmanager
def _server(world: World, logs: Path) -> Iterator[Any]:
    from pipelines.generation.engines import open_engine
    from pipelines.generation.settings import VllmEngineParams

    with vllm_server(world.directory, logs) as url:
        yield open_engine(VllmEngineParams(name="vllm", dtype="float32", url=url), world.directory)


_OPEN = {"native": _native, "vllm": _in_process, "vllm-server": _server}


@pytest.fixture
def start_server() -> Callable[..., Any]:
    """`vllm_server`, for a test that wants one of its own."""
    return vllm_server


@contextmanager
def vllm_server(directory: Path, logs: Path, development: bool = True) -> Iterator[str]:
    """A vLLM server for a checkpoint, as docs/vllm.md starts one; its URL. It ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory)]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--no-enable-chunked-prefill",
    ]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    command += ["--gpu-memory-utilization", str(_MEMORY_SHARE)]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": str(int(development)), "OMP_NUM_THREADS": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    log = logs / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(2 * _SERVER_STARTS_IN_S):
        if process.poll() is not None:
            break
        try:
            opener.open(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the vLLM server did not start:\n{log.read_text()[-3000:]}")
