"""Parameters of distillation. Light at import: no torch."""

from __future__ import annotations

from pydantic import Field, model_validator

from pipelines.training.settings import TrainingParams


class DistillationParams(TrainingParams):
    """How a student learns from a teacher's samples."""

    cross_entropy: float = Field(ge=0, description="weight of the cross-entropy on the teacher's verified samples")
    kl: float = Field(ge=0, description="weight of the per-token KL to the teacher")

    @model_validator(mode="after")
    def _something(self) -> DistillationParams:
        if self.cross_entropy == self.kl == 0:
            raise ValueError("cross_entropy and kl must not both be 0")
        return self
