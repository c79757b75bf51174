"""Stage `rl@N`: one RL round. Starting checkpoint + data/filter + data/reward -> data/rl/N (checkpoint, rollouts)."""

from __future__ import annotations

from pydantic import Field

from pipelines.generation.settings import Sampling
from pipelines.rl.settings import Advantage, PolicyLoss, RewardWeights
from pipelines.settings import Strict
from pipelines.training.settings import Optimiser
from tasks.contract import main
from tasks.execution import Execution


class Params(Strict):
    """Section `rl` of params.yaml; every round uses it."""

    steps: int = Field(ge=1, description="batches of rollouts per round")
    problems_per_step: int = Field(ge=1, description="problems per batch")
    group_size: int = Field(ge=2, description="rollouts per problem; the group mean is the baseline")
    updates_per_step: int = Field(
        ge=1, description="optimiser steps a batch is split into; above 1 the clip takes effect"
    )
    sampling: Sampling
    loss: PolicyLoss
    advantage: Advantage
    reward: RewardWeights
    optimiser: Optimiser
    checkpoint_every: int = Field(ge=1, description="batches between two checkpoints of a run that may be killed")


def compute(stage: Execution) -> None:
    from pipelines.base.architectures import load_model, load_tokenizer, save_checkpoint
    from pipelines.generation.rollouts import encode_problems
    from pipelines.records import PROBLEM, ROLLOUT, read, write
    from pipelines.rewards.model import RewardModel
    from pipelines.rl.round import run_round
    from pipelines.training.loop import history_table

    params: Params = stage.params
    start = stage.input(stage.settings.rounds[stage.key].init)
    problems = read(stage.input("data/filter") / "problems.parquet", PROBLEM)
    policy, tokenizer = load_model(start), load_tokenizer(start)
    history, rollouts = run_round(
        policy,
        tokenizer,
        encode_problems(tokenizer, problems),
        steps=params.steps,
        problems_per_step=params.problems_per_step,
        group_size=params.group_size,
        updates_per_step=params.updates_per_step,
        sampling=params.sampling,
        loss=params.loss,
        advantage=params.advantage,
        weights=params.reward,
        optimiser=params.optimiser,
        reward_model=RewardModel.load(stage.input("data/reward")) if params.reward.reward_model > 0 else None,
        reference=load_model(start).eval() if params.loss.kl > 0 else None,
        seed=stage.seed,
        stage=stage.name,
        scratch=stage.scratch,
        checkpoint_every=params.checkpoint_every,
        report=stage.report,
    )
    save_checkpoint(policy, tokenizer, stage.output)
    write(stage.output / "rollouts.parquet", rollouts, ROLLOUT)
    history_table(history, stage.output / "history.parquet")
    stage.log_rows("problems", problems.num_rows)
    stage.log_rows("rollouts", rollouts.num_rows)
    last = history[-max(1, len(history) // 10) :]
    stage.write_metrics({name: sum(row[name] for row in last) / len(last) for name in ("reward", "accuracy", "length")})


if __name__ == "__main__":
    main(compute)
