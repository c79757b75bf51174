"""One RL round: sample groups, score them against their own mean, update the policy, keep every rollout.

GRPO-style policy optimisation (Shao et al. 2024, DeepSeekMath, section 4.1) with the group mean as baseline, a
token-level denominator over the whole update and separate clips (DAPO, Yu et al. 2025), on groups with both outcomes.
Legend: P problems of a step, G rollouts per problem, R = P x G rollouts, T tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipelines.files import remove, sha256, write_whole
from pipelines.generation.engine import Engine
from pipelines.generation.rollouts import EncodedProblems, correct_matrix, rollout_table, sample_rollouts
from pipelines.rewards.compose import compose
from pipelines.rewards.model import RewardModel
from pipelines.rl.advantages import group_advantages, informative_groups
from pipelines.rl.losses import behaviour_kl, clip_share, clipped_policy_gradient, kl_to_reference
from pipelines.rl.settings import PolicyLoss, RoundParams
from pipelines.training.batch import MicroBatch, Sequence, Unit, indices_at, micro_batches
from pipelines.training.checkpoint import CheckpointStore
from pipelines.training.components import Outputs, TokenComponent, token_outputs
from pipelines.training.loop import Report, optimise
from pipelines.training.settings import Compute
from pipelines.training.team import Team
from pipelines.training.trainer import Trainer

_DEAD_STREAK = 10
_SHARD = re.compile(r"tick-\d{8}\.parquet")


def run_round(
    policy: torch.nn.Module,
    tokenizer,
    engine: Engine,
    problems: EncodedProblems,
    params: RoundParams,
    *,
    reward_model: RewardModel | None,
    reference: torch.nn.Module | None,
    seed: int,
    stage: str,
    scratch: Path,
    report: Report,
    warn: Callable[[str], None] = print,
) -> tuple[list[dict[str, float]], pa.Table]:
    """Train `policy` in place; returns the metrics per step and all rollouts (records.ROLLOUT).

    engine: samples from the policy's weights, given to it by `load` at the begin of every step.
    reference: the policy of the KL term, needed when loss.kl > 0. reward_model: needed when its weight is > 0.
    stage: name that enters the randomness of every sample ("rl@1"). scratch: where checkpoints and rollouts are kept.
    """
    pad_id = tokenizer.pad_token_id
    G = params.group_size
    forward = partial(token_outputs, temperature=params.sampling.temperature)
    trainer = Trainer(policy, _components(params.loss), params, params.steps * params.updates_per_step, pad_id, forward)
    log = RolloutLog(scratch / "rollouts")
    contrast = Contrast(stage, warn)

    def units_at(step: int) -> tuple[list[list[Unit]], dict[str, float]]:
        chosen = problems.take(indices_at(step, params.problems_per_step, seed, len(problems)))
        engine.load(trainer.weights(), version=trainer.updates)
        rows_R = sample_rollouts(
            engine, tokenizer, chosen, params.group_size, params.sampling, seed=seed, stage=stage, step=step + 1
        )
        parts = {"verifier": np.array([row["reward"] for row in rows_R], dtype=np.float64)}
        if reward_model is not None:
            parts["reward_model"] = _sigmoid(reward_model.scores([row["tokens"] for row in rows_R]))
        rewards_P_G = compose(parts, params.reward.model_dump()).reshape(-1, params.group_size)
        advantages_P_G = group_advantages(rewards_P_G, params.advantage.scale)
        correct_P_G = correct_matrix(rows_R, params.group_size)
        informative_P = informative_groups(correct_P_G)

        blocks = np.array_split(np.flatnonzero(informative_P), params.updates_per_step)
        blocks = [block for block in blocks if len(block)]
        update_of_P = {int(p): trainer.updates + 1 + number for number, block in enumerate(blocks) for p in block}
        for index, row in enumerate(rows_R):
            problem = index // params.group_size
            row["reward"] = float(rewards_P_G.flat[index])
            row["reward_parts"] = [(name, float(values[index])) for name, values in parts.items()]
            row["advantage"] = float(advantages_P_G.flat[index])
            row["trained_steps"] = [update_of_P[problem]] if problem in update_of_P else []
            row["untrained_reason"] = "" if problem in update_of_P else _same_outcome(correct_P_G[problem])
        log.append(rows_R)

        contrast.note(len(blocks) > 0)
        sequences_R = [_sequence(row) for row in rows_R]
        groups_P = [tuple(sequences_R[p * G : (p + 1) * G]) for p in range(len(chosen))]
        updates = [[groups_P[p] for p in block] for block in blocks]
        if reference is not None:
            updates = [with_reference_logp(units, reference, forward, params.compute, pad_id) for units in updates]
        metrics = {
            "reward": float(rewards_P_G.mean()),
            "accuracy": float(correct_P_G.mean()),
            "informative_groups": float(informative_P.mean()),
            "length": float(np.mean([sum(row["action_mask"]) for row in rows_R])),
            "truncated": float(np.mean([row["finish_reason"] == "length" for row in rows_R])),
        }
        return updates, metrics

    store = CheckpointStore(scratch / "checkpoints")
    log.truncate(store.newest_tick())  # before resuming: later shards belong to a checkpoint that was never finished
    history = optimise(
        trainer,
        params.steps,
        units_at,
        store,
        params.checkpoint_every,
        report,
        controllers={"contrast": contrast},
        on_checkpoint=log.flush,
    )
    return history, log.table()


class Contrast:
    """Counts the steps in a row that had nothing to teach, and says so when they become many."""

    def __init__(self, stage: str, warn: Callable[[str], None]) -> None:
        self.stage, self.warn, self.streak = stage, warn, 0

    def note(self, is_there: bool) -> None:
        self.streak = 0 if is_there else self.streak + 1
        if self.streak and self.streak % _DEAD_STREAK == 0:
            self.warn(
                f"{self.stage}: no group of the last {self.streak} steps held both right and wrong answers: "
                "nothing was learned"
            )

    def state(self) -> dict[str, Any]:
        return {"streak": self.streak}

    def restore(self, state: dict[str, Any]) -> None:
        self.streak = state["streak"]


class RolloutLog:
    """Every rollout of a round, in shards that end where a checkpoint is written, so a resumed round repeats none."""

    def __init__(self, directory: Path):
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.pending: list[dict[str, Any]] = []
        self.digests: dict[Path, str] = {}  # of the shards that are written

    def append(self, rows: Seq[dict[str, Any]]) -> None:
        self.pending.extend(rows)

    def flush(self, tick: int) -> dict[Path, str]:
        """Write what came since the last flush as the shard that belongs to the checkpoint `tick`.

        Returns the SHA-256 of every shard up to there.
        """
        if self.pending and Team().is_first:
            path = self.directory / f"tick-{tick:08d}.parquet"
            write_whole(path, partial(pq.write_table, rollout_table(self.pending)))
            self.digests[path] = sha256(path)
        self.pending = []
        return self.digests

    def truncate(self, tick: int) -> None:
        """Drop the shards after the checkpoint `tick`: those they belong to were not finished."""
        for path in self.directory.iterdir() if Team().is_first else ():
            if not _SHARD.fullmatch(path.name) or int(path.stem.removeprefix("tick-")) > tick:
                remove(path)
            else:
                self.digests[path] = sha256(path)

    def table(self) -> pa.Table:
        return pa.concat_tables([pq.read_table(path) for path in sorted(self.directory.glob("*.parquet"))])


def _components(loss: PolicyLoss) -> list[TokenComponent]:
    policy = TokenComponent(
        "policy",
        1.0,
        "action",
        clipped_policy_gradient(loss.clip_low, loss.clip_high),
        {"clip_share": clip_share(loss.clip_low, loss.clip_high), "behaviour_kl": behaviour_kl},
    )
    return [policy] + ([TokenComponent("kl", loss.kl, "action", kl_to_reference)] if loss.kl > 0 else [])


@torch.inference_mode()
def with_reference_logp(
    units: Seq[Unit],
    reference: torch.nn.Module,
    forward: Callable[[torch.nn.Module, MicroBatch], Outputs],
    compute: Compute,
    pad_id: int,
) -> list[Unit]:
    """The units with the value "reference_logp": log-probs of the scored tokens under `reference`, else 0."""
    device = next(reference.parameters()).device
    found: list[Unit] = list(units)
    for batch in micro_batches(units, compute.layout, compute.micro_tokens, pad_id, device):
        logp_N = forward(reference, batch).logp_N.cpu().numpy()
        ends = np.cumsum(np.bincount(batch.sequences_N.cpu().numpy(), minlength=len(batch.ends_S[0])))
        of_sequences = iter(np.split(logp_N, ends[:-1]))
        for index in batch.units:
            sequences = []
            for sequence in units[index]:
                logp_T = np.zeros(len(sequence.tokens), dtype=np.float32)
                logp_T[sequence.scored()] = next(of_sequences)
                sequences.append(Sequence(sequence.tokens, sequence.values | {"reference_logp": logp_T}))
            found[index] = tuple(sequences)
    return found


def _sequence(row: dict[str, Any]) -> Sequence:
    action = np.asarray(row["action_mask"], dtype=np.float32)
    values = {
        "action": action,
        "advantage": action * np.float32(row["advantage"]),
        "behaviour_logp": np.asarray(row["logprobs"], dtype=np.float32),
    }
    return Sequence(np.asarray(row["tokens"]), values)


def _same_outcome(correct_G: np.ndarray) -> str:
    return f"every rollout of the group was {'right' if correct_G.all() else 'wrong'}"


def _sigmoid(scores_R: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.clip(scores_R, -60, 60)))
