"""Sampling one checkpoint on the held-out problems, with the reward model's score of every answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from pipelines.base.architectures import parameter_count
from pipelines.generation.engines import open_engine
from pipelines.generation.rollouts import encode_problems, rollout_table, sample_in_parts
from pipelines.generation.settings import EngineParams, Sampling
from pipelines.rewards.model import RewardModel


def sample_checkpoint(
    engine_params: EngineParams,
    directory: Path,
    name: str,
    problems: pa.Table,
    samples: int,
    sampling: Sampling,
    reward_model: RewardModel | None,
    seed: int,
    progress: Callable[[int, int, str], None],
) -> tuple[pa.Table, int]:
    """`samples` rollouts per problem as a records.ROLLOUT table, and the parameter count of the checkpoint.

    Samples of two checkpoints share no randomness: `name` enters every key. reward_parts holds "verifier" and, with a
    reward model, its raw score under "reward_model".
    """
    engine = open_engine(engine_params, directory)
    rows = sample_in_parts(
        engine,
        engine.tokenizer,
        encode_problems(engine.tokenizer, problems),
        samples,
        sampling,
        seed=seed,
        stage=f"evaluate/{name}",
        progress=progress,
    )
    engine.close()
    if reward_model is not None:
        scores_R = reward_model.scores([row["tokens"] for row in rows])
        for row, score in zip(rows, scores_R, strict=True):
            row["reward_parts"] = [*row["reward_parts"], ("reward_model", float(score))]
    return rollout_table(rows), parameter_count(directory)
