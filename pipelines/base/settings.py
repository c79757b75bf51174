"""Parameters of the starting checkpoint. Light at import: no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipelines.settings import Strict


class Architecture(Strict):
    """The shape of a Qwen3 model (grouped-query attention, query and key norms, rotary positions, gated MLP)."""

    hidden: int = Field(ge=8, le=16384, description="width of the residual stream")
    layers: int = Field(ge=1, le=256, description="number of transformer blocks")
    heads: int = Field(ge=1, le=256, description="query heads")
    kv_heads: int = Field(ge=1, le=256, description="key and value heads; divides heads")
    head_dim: int = Field(ge=4, le=512, multiple_of=2, description="width of one head; even, for rotary positions")
    mlp: int = Field(ge=8, le=131072, description="width of the gated MLP")
    rope_theta: float = Field(
        gt=1, description="base of the rotary frequencies; smaller tells near positions apart better"
    )
    max_length: int = Field(ge=16, le=1048576, description="longest sequence in tokens, prompt and completion")

    @model_validator(mode="after")
    def _grouped(self) -> Architecture:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, {self.kv_heads} does not divide {self.heads}")
        return self


class Initialise(Strict):
    """A new model with random weights, and the default tokenizer built in code."""

    kind: Literal["initialise"] = Field(description="new weights from the seed")
    architecture: Architecture = Field(description="shape of the model")


class Import(Strict):
    """A checkpoint somebody else trained, with its own tokenizer."""

    kind: Literal["import"] = Field(description="a local directory or a hub revision")
    checkpoint: str = Field(min_length=1, description="path of a Hugging Face directory, or the hub's owner/name")
    revision: str | None = Field(
        default=None, description="commit on the hub, 40 hex digits; not for a local directory"
    )
    sha256: str | None = Field(
        default=None,
        pattern="^[0-9a-f]{64}$",
        description="digest of the files; without it a run prints that of a local directory and trusts a hub's commit",
    )


Origin = Annotated[Initialise | Import, Field(discriminator="kind", description="initialise or import")]


class BaseParams(Strict):
    """Where the starting checkpoint comes from."""

    source: Origin
