"""Parameters of sampling. Light at import: no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from pipelines.settings import Strict


class Sampling(Strict):
    """How completions are drawn."""

    temperature: float = Field(ge=0.001, le=10, description="softmax temperature; 1 is the model's own distribution")
    max_new_tokens: int = Field(
        ge=1, le=65536, description="tokens after which a completion is cut (finish reason: length)"
    )
    top_p: float = Field(
        default=1.0, ge=1e-6, le=1, description="likeliest tokens kept up to this probability; 1 is all"
    )
    top_k: int = Field(default=0, ge=0, description="likeliest tokens kept; 0 is all")
    stop: list[str] = Field(default=[], description="texts that end a completion; they stay part of it")
    stop_ids: list[int] = Field(default=[], description="token ids that end a completion, beside the model's own")

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError("an empty stop text would end every completion at once; remove it")
        return stop

    @property
    def is_full_support(self) -> bool:
        """Whether every token can be drawn."""
        return self.top_p == 1 and self.top_k == 0


class FullSupportSampling(Sampling):
    """Sampling of what is trained on by its probability ratio."""

    @model_validator(mode="after")
    def _whole(self) -> FullSupportSampling:
        if not self.is_full_support:
            raise ValueError(
                "top_p and top_k must stay 1 and 0 in RL: drawn from a part of the vocabulary, tokens have another "
                "probability than the policy gives them, and the gradient is biased"
            )
        return self


class NativeEngineParams(Strict):
    """The engine of this project: PyTorch in the stage's own process."""

    name: Literal["native"]
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="number format while sampling")
    cache_tokens: int = Field(
        default=16384, ge=1, description="keys and values held at once, in tokens; speed and memory only"
    )


class VllmEngineParams(Strict):
    """vLLM, in the stage's own process or as a server that was started beside it; docs/vllm.md says how."""

    name: Literal["vllm"]
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", description="number format while sampling; of a server, the one it was started with"
    )
    url: str | None = Field(
        default=None,
        pattern="^https?://[^/]+/?$",
        description="of a running server, such as http://127.0.0.1:8000; null is vLLM in the stage's own process",
    )
    memory_share: float = Field(
        default=0.5, gt=0, le=1, description="share of the GPU that vLLM may hold, beside training; not for a server"
    )
    max_length: int | None = Field(
        default=None, ge=16, description="longest sequence in tokens; null is the model's own limit; not for a server"
    )
    shared_dir: str | None = Field(
        default=None, description="existing directory that a server sees too, for new weights; null is a temporary one"
    )
    timeout_s: float = Field(default=600.0, gt=0, description="longest wait for one answer of a server, in seconds")


EngineParams = Annotated[NativeEngineParams | VllmEngineParams, Field(discriminator="name")]
