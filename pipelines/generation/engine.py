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
        tokens and for an unknown measure, FloatingPointError when the model predicts NaN or infinity.
        """
        ...

    def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample from `weights`, a state dict, from now on.

        Raises ValueError for a missing, extra or misshapen tensor; the second name of a tied tensor may be missing.
        Raises RuntimeError when the engine is found to sample from other weights afterwards.
        """

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


def tied_names(own: Mapping[str, Tensor]) -> dict[str, str]:
    """Of a state dict, every name whose tensor an earlier name holds already, and that name (a tied output head)."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    names = {name: first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name) for name, tensor in own.items()}
    return {name: holder for name, holder in names.items() if name != holder}


def fitting_weights(
    own: Mapping[str, Tensor], weights: Mapping[str, Tensor], tied: Mapping[str, str]
) -> dict[str, Tensor]:
    """`weights` for a model with the state dict `own`, every tensor once: those of the names `tied` are left out.

    A tied tensor may be missing. Raises ValueError unless the other names and all shapes are those of `own`, and for a
    tied tensor that is not the one it is tied to.
    """
    optional = {name for name, holder in tied.items() if holder in weights}
    if differing := (own.keys() ^ weights.keys()) - optional:
        raise ValueError(f"these weights do not fit the model: differing names {sorted(differing)[:5]}")
    for name, tensor in weights.items():
        if own[name].shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, the engine's model wants {tuple(own[name].shape)}"
            )
    for name in optional & weights.keys():
        one, other = weights[name], weights[tied[name]]
        if one.data_ptr() != other.data_ptr() and not one.equal(other):
            raise ValueError(f"{name} and {tied[name]} are one tensor in the model, these weights have two")
    return {name: tensor for name, tensor in weights.items() if name not in tied}
