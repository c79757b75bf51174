"""The base of every parameter model, and the pieces that several stages share. Light at import: no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """A frozen parameter model: unknown keys and wrong types are errors, nothing is converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
