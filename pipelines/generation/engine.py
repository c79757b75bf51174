"""The engine protocol: what every sampler of the project promises, whichever library runs the model.

A sample's randomness is a function of its key and the token position, never of the batch it sat in. A key is made from
(seed, stage, round, step, problem id, sample index) by `sample_key`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pipelines.errors import UserError
from pipelines.generation.settings import Sampling

if TYPE_CHECKING:
    from torch import Tensor

MEASURES = ("entropy", "self_certainty")


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt and one randomness key per sample wanted of it."""

    tokens: list[int]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Completions:
    """Samples in prompt-major order (prompt 0 sample 0, prompt 0 sample 1, ...), what ended them included.

    `logprobs` are natural logs under the distribution that was sampled from, one per token. `finish_reasons`: "stop"
    (an end token was drawn or a stop text completed) or "length" (cut at max_new_tokens). `policy_version` is the
    version of the weights that sampled, as given to `load`. `measures`: what was asked for of MEASURES, per token.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    policy_version: int
    measures: dict[str, list[list[float]]] = field(default_factory=dict)


class Engine(Protocol):
    """A model that can be sampled from."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, measures: Collection[str] = ()) -> Completions:
        """One completion per key of every prompt.

        measures: of the distribution each token was drawn from, in nats; "entropy" is -sum p log p, "self_certainty"
        is KL(uniform || p) (Kang et al. 2025, "Scalable best-of-N selection via self-certainty", eq. 9).
        Raises UserError when a prompt and max_new_tokens exceed the model's positions, ValueError for a prompt without
        tokens and for an unknown measure.
        """
        ...

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample from `weights` from now on. A missing, extra or misshapen tensor raises ValueError."""

    def close(self) -> None: ...


def sample_key(seed: int, stage: str, step: int, problem_id: str, sample: int) -> int:
    """The 64-bit randomness key of one sample; `stage` holds the round (rl@2)."""
    text = f"{seed}\0{stage}\0{step}\0{problem_id}\0{sample}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def check_request(
    prompts: Sequence[Prompt], sampling: Sampling, measures: Collection[str], positions: int | None
) -> None:
    """Refuse what no engine can do; `positions`: the longest sequence of the model, None without a limit."""
    unknown = sorted(set(measures) - set(MEASURES))
    if unknown:
        raise ValueError(f"there is no measure {unknown[0]!r}; there are {', '.join(MEASURES)}")
    if not all(prompt.tokens for prompt in prompts):
        raise ValueError("a prompt without tokens cannot be sampled from")
    longest = max((len(prompt.tokens) for prompt in prompts), default=0) + sampling.max_new_tokens
    if positions is not None and longest > positions:
        raise UserError(
            f"the longest prompt and sampling.max_new_tokens ({sampling.max_new_tokens}) make {longest} tokens, "
            f"the model has {positions} positions; lower max_new_tokens"
        )


def check_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless `weights` has the names and shapes of `own`."""
    if own.keys() != weights.keys():
        raise ValueError(
            f"these weights do not fit the model: differing names {sorted(own.keys() ^ weights.keys())[:5]}"
        )
    for name, tensor in weights.items():
        if own[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, the engine's model wants {tuple(own[name].shape)}"
            )
