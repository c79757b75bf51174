"""The engine protocol: what every sampler of the project promises, whichever library runs the model.

A sample's randomness is a function of its key and the token position, never of the batch it sat in. A key is made from
(seed, stage, round, step, problem id, sample index) by `sample_key`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pipelines.generation.settings import Sampling

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt and one randomness key per sample wanted of it."""

    tokens: list[int]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Completions:
    """Samples in prompt-major order (prompt 0 sample 0, prompt 0 sample 1, ...), the end token included.

    `logprobs` are natural logs under the distribution that was sampled from (temperature applied), one per token.
    `finish_reasons`: "stop" (the end token was drawn) or "length" (cut at max_new_tokens).
    `policy_version` is the version of the weights that sampled, as given to `load`.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    policy_version: int


class Engine(Protocol):
    """A model that can be sampled from."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> Completions: ...

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample from `weights` from now on. A missing, extra or misshapen tensor raises ValueError."""

    def close(self) -> None: ...


def sample_key(seed: int, stage: str, step: int, problem_id: str, sample: int) -> int:
    """The 64-bit randomness key of one sample; `stage` holds the round (rl@2)."""
    text = f"{seed}\0{stage}\0{step}\0{problem_id}\0{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
