"""Which engine samples: the one that params.yaml names."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.base.architectures import load_tokenizer
from pipelines.generation.engine import Completions, Engine, Prompt
from pipelines.generation.native import NativeEngine
from pipelines.generation.settings import EngineParams, Sampling
from pipelines.training.team import Team

if TYPE_CHECKING:
    from torch import Tensor


def open_engine(params: EngineParams, directory: Path) -> Engine:
    """An engine for the checkpoint in `directory`; in a team, one that all processes must open and use alike."""
    if params.name == "vllm" and params.url and Team().size > 1:
        return FirstsEngine(_engine_class(params), directory, params)
    return _shared(_engine_class(params).open(directory, params))


def engine_of_policy(params: EngineParams, policy: Any, tokenizer: Any, directory: Path, is_adapted: bool) -> Engine:
    """An engine for a policy that is being trained, and that `directory` holds the beginning of.

    The native engine samples from the policy's own parameters unless these get adapters (`is_adapted`); every other
    engine holds a copy. All are told of new weights by `load`.
    """
    if params.name == "native":
        return _shared(NativeEngine(copy.deepcopy(policy) if is_adapted else policy, tokenizer, params))
    return open_engine(params, directory)


def _engine_class(params: EngineParams) -> Any:
    if params.name == "native":
        return NativeEngine
    if params.url:
        from pipelines.generation.vllm_server import VllmServerEngine

        return VllmServerEngine
    from pipelines.generation.vllm_in_process import VllmEngine

    return VllmEngine


def _shared(engine: Engine) -> Engine:
    return engine if Team().size == 1 else TeamEngine(engine)


class TeamEngine:
    """The engines of a team's processes as one: each samples a share of the prompts, all of them get all samples."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.tokenizer, self.team = engine, engine.tokenizer, Team()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, measures: Collection[str] = ()) -> Completions:
        def samples_of(number: int) -> int:
            return len(prompts[number].keys)

        mine = self.team.share(range(len(prompts)), samples_of)
        parts = self.team.gather((mine, self._drawn([prompts[number] for number in mine], sampling, measures)))
        failures = [part for _, part in parts if isinstance(part, Exception)]
        if failures:  # in every process, or the others would wait for it
            raise failures[0]
        found, drawn = {}, parts[0][1]
        for numbers, part in parts:
            samples = iter(_columns(part))
            found |= {number: list(islice(samples, samples_of(number))) for number in numbers}
        samples = [sample for number in range(len(prompts)) for sample in found[number]]
        if not samples:
            return drawn
        tokens, logprobs, reasons, *measured = map(list, zip(*samples, strict=True))
        return Completions(
            tokens, logprobs, reasons, drawn.policy_version, dict(zip(drawn.measures, measured, strict=True))
        )

    def _drawn(
        self, prompts: Sequence[Prompt], sampling: Sampling, measures: Collection[str]
    ) -> Completions | Exception:
        try:
            return self.engine.generate(prompts, sampling, measures)
        except Exception as error:
            return error

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.engine.load(weights, version)

    def close(self) -> None:
        self.engine.close()


class FirstsEngine:
    """An engine that serves a whole team, which only its first process asks; the others are told what was drawn."""

    def __init__(self, engine_class: Any, directory: Path, params: EngineParams) -> None:
        self.team, self.tokenizer = Team(), load_tokenizer(directory)
        self.engine: Engine | None = engine_class.open(directory, params) if self.team.is_first else None

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, measures: Collection[str] = ()) -> Completions:
        return self.team.tell(self.engine.generate(prompts, sampling, measures) if self.engine else None)

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        if self.engine:
            self.engine.load(weights, version)

    def close(self) -> None:
        if self.engine:
            self.engine.close()


def _columns(drawn: Completions) -> Iterator[tuple[Any, ...]]:
    return zip(drawn.tokens, drawn.logprobs, drawn.finish_reasons, *drawn.measures.values(), strict=True)
