"""Parameters of an RL round. Light at import: no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pipelines.generation.settings import FullSupportSampling
from pipelines.settings import Strict
from pipelines.training.settings import Training


class PolicyLoss(Strict):
    """The clipped policy-gradient loss and its optional KL term."""

    clip_low: float = Field(ge=0, lt=1, description="the probability ratio is clipped below at 1 - clip_low")
    clip_high: float = Field(ge=0, description="and above at 1 + clip_high (larger than clip_low: DAPO's clip-higher)")
    kl: float = Field(
        ge=0, description="weight of the KL to the round's starting policy (k3 estimator); 0 leaves it out"
    )


class Advantage(Strict):
    """How the rewards of a group become advantages."""

    scale: Literal["none", "group_std"] = Field(
        description="none: reward minus group mean (Dr. GRPO); group_std: over the group's standard deviation (GRPO)"
    )


class RewardWeights(Strict):
    """The parts of the reward; their weighted sum is what the group baseline sees."""

    verifier: float = Field(ge=0, description="weight of the verifier's score (0 or 1)")
    reward_model: float = Field(
        ge=0, description="weight of the reward model's sigmoid score; 0 does not load the model"
    )

    @model_validator(mode="after")
    def _some(self) -> RewardWeights:
        if not self.verifier and not self.reward_model:
            raise ValueError("verifier and reward_model are both 0, which rewards nothing; give one of them a weight")
        return self


class RoundParams(Training):
    """One RL round."""

    steps: int = Field(ge=1, description="batches of rollouts per round")
    problems_per_step: int = Field(ge=1, description="problems per batch")
    group_size: int = Field(ge=2, description="rollouts per problem; the group mean is the baseline")
    updates_per_step: int = Field(
        ge=1, description="optimiser steps a batch is split into; above 1 the clip takes effect"
    )
    sampling: FullSupportSampling
    loss: PolicyLoss
    advantage: Advantage
    reward: RewardWeights
