"""Stage `rl@N`: one RL round. Starting checkpoint + data/filter + data/reward -> data/rl/N (checkpoint, rollouts)."""

from __future__ import annotations

from pipelines.rl.settings import RoundParams
from tasks.contract import main
from tasks.execution import Execution


class Params(RoundParams):
    """Section `rl` of params.yaml; every round uses it."""


def compute(stage: Execution) -> None:
    from pipelines.base.architectures import load_model, load_tokenizer, save_checkpoint
    from pipelines.generation.engines import engine_of_policy
    from pipelines.generation.rollouts import encode_problems
    from pipelines.records import PROBLEM, ROLLOUT, read, write
    from pipelines.rewards.model import RewardModel
    from pipelines.rl.round import run_round
    from pipelines.training.loop import history_table

    params: Params = stage.params
    start = stage.input(stage.settings.rounds[stage.key].init)
    problems = read(stage.input("data/filter") / "problems.parquet", PROBLEM)
    policy, tokenizer = load_model(start), load_tokenizer(start)
    engine = engine_of_policy(stage.engine, policy, tokenizer, start, is_adapted=params.lora is not None)
    history, rollouts = run_round(
        policy,
        tokenizer,
        engine,
        encode_problems(tokenizer, problems),
        params,
        reward_model=RewardModel.load(stage.input("data/reward")) if params.reward.reward_model > 0 else None,
        reference=load_model(start).eval() if params.loss.kl > 0 else None,
        seed=stage.seed,
        stage=stage.name,
        scratch=stage.scratch,
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
