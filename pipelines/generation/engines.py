"""Which engine samples: the one that params.yaml names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from pipelines.generation.engine import Engine
from pipelines.generation.native import NativeEngine
from pipelines.generation.settings import EngineParams


def open_engine(params: EngineParams, directory: Path) -> Engine:
    """An engine for the checkpoint in `directory`."""
    if params.name == "native":
        return NativeEngine.open(directory, params)
    from pipelines.generation.vllm import open_vllm

    return open_vllm(directory, params)


def engine_of_policy(params: EngineParams, policy: Any, tokenizer: Any, directory: Path, is_adapted: bool) -> Engine:
    """An engine for a policy that is being trained, and that `directory` holds the beginning of.

    The native engine samples from the policy's own parameters unless these get adapters (`is_adapted`); every other
    engine holds a copy. All are told of new weights by `load`.
    """
    if params.name == "native":
        return NativeEngine(copy.deepcopy(policy) if is_adapted else policy, tokenizer, params)
    return open_engine(params, directory)
