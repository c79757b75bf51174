"""vLLM in this process. docs/vllm.md says how to install it. Legend: T tokens, V vocabulary."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from pipelines.base.architectures import load_model, load_tokenizer
from pipelines.errors import UserError, failures_said_as
from pipelines.generation.settings import VllmEngineParams
from pipelines.generation.vllm_common import Drawn, PlainModel, ProbedEngine, shorter_length


class VllmEngine(ProbedEngine):
    """vLLM in this process."""

    def __init__(self, llm: Any, tokenizer: Any, plain: PlainModel, params: VllmEngineParams) -> None:
        super().__init__(tokenizer, plain, params, shorter_length(plain.positions, params.max_length))
        self.llm = llm

    @classmethod
    def open(cls, directory: Path, params: VllmEngineParams | None = None) -> VllmEngine:
        """An engine for a checkpoint directory. Raises UserError when vLLM is not installed or cannot run the model."""
        params = params or VllmEngineParams(name="vllm")
        llm_class = _llm_class()
        tokenizer, model = load_tokenizer(directory), load_model(directory)
        weights, plain = model.state_dict(), PlainModel(model, tokenizer)
        longest = shorter_length(plain.positions, params.max_length)
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
                **({} if torch.cuda.is_available() else _cpu_options(longest)),
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

    def _sample(self, requests: Sequence[tuple[list[int], int]], options: dict[str, Any]) -> list[Drawn]:
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

    def _drawn(self, output: Any, whole_distributions: bool) -> Drawn:
        flat = output.logprobs
        logp_T_V = None
        if whole_distributions:
            places = [slice(*ends) for ends in zip(flat.start_indices, flat.end_indices, strict=True)]
            logp_T_V = self._distributions([(flat.token_ids[place], flat.logprobs[place]) for place in places])
        return Drawn(
            list(output.token_ids),
            [flat.logprobs[first] for first in flat.start_indices],
            output.finish_reason,
            logp_T_V,
        )

    def _put(self, weights: dict[str, Tensor]) -> None:
        # once for all weights: every call ends with a pass that makes them ready for use
        tensors = ((name, tensor.to(self._format(tensor))) for name, tensor in weights.items())
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        except Exception as error:  # which one it is depends on the model and on vLLM's release
            raise RuntimeError(
                f"vLLM could not take the new weights, and is of no use any more: {shorten(str(error), 300)}"
            ) from error
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept keys and values of older weights: its prefix cache could not be emptied")


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
