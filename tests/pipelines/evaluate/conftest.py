"""Synthetic checkpoints: rollouts of known accuracy, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines.records import DECISION, PROBLEM, ROLLOUT, content_id, problem_id, table


def make_problems(per_level: int = 2, families: tuple[str, ...] = ("chain", "sums"), levels: int = 2) -> pa.Table:
    rows = []
    for family in families:
        for level in range(1, levels + 1):
            for i in range(per_level):
                prompt, answer = f"{family} of level {level}, number {i}: 1 + {i}", str(1 + i)
                rows.append(
                    {
                        "id": problem_id(prompt, answer, "exact"),
                        "parents": [],
                        "family": family,
                        "level": level,
                        "split": "test",
                        "prompt": prompt,
                        "answer": answer,
                        "verifier": "exact",
                        "verifier_args": "{}",
                        "source": "generator:synthetic",
                    }
                )
    return table(rows, PROBLEM)


def rollout(problem: dict[str, Any], sample: int, correct: bool, **changes: Any) -> dict[str, Any]:
    """One verified rollout of a problem row; `changes` overwrite columns."""
    answer = problem["answer"] if correct else str(int(problem["answer"]) + 1 + sample % 2)
    steps = 3 + sample
    row = {
        "id": content_id("rollout", problem["id"], sample, correct),
        "parents": [problem["id"]],
        "problem_id": problem["id"],
        "family": problem["family"],
        "level": problem["level"],
        "group": problem["id"],
        "stage": "test",
        "step": 0,
        "sample": sample,
        "policy_version": 0,
        "prompt_tokens": 2,
        "tokens": [1, 2] + [3] * steps,
        "action_mask": [False, False] + [True] * steps,
        "logprobs": [0.0] * (2 + steps),
        "turn_starts": [2],
        "state_keys": [problem["id"]],
        "text": f"<think>1 + {sample}</think>{answer}",
        "finish_reason": "stop",
        "correct": correct,
        "verdict": "equal" if correct else "different",
        "reward": float(correct),
        "reward_parts": [("verifier", float(correct))],
        "advantage": 0.0,
        "trained_steps": [],
        "untrained_reason": "not sampled for training",
    }
    return row | changes


def make_samples(
    problems: pa.Table,
    rate: float | dict[str, float],
    samples: int = 4,
    seed: int = 0,
    scored: bool = True,
    **changes: Any,
) -> pa.Table:
    """`samples` rollouts of every problem, each correct with probability `rate` (or that of its family)."""
    rng = np.random.default_rng(seed)
    rows = []
    for problem in problems.to_pylist():
        chance = rate if isinstance(rate, float) else rate[problem["family"]]
        for sample in range(samples):
            correct = bool(rng.random() < chance)
            parts = [("verifier", float(correct))]
            if scored:
                parts.append(("reward_model", float(correct) + rng.normal()))
            rows.append(rollout(problem, sample, correct, **({"reward_parts": parts} | changes)))
    return table(rows, ROLLOUT)


def make_training(problems: pa.Table, steps: int = 12, groups: int = 4, samples: int = 4) -> pa.Table:
    """Rollouts of an RL round whose accuracy rises with the step."""
    rng = np.random.default_rng(0)
    everything = problems.to_pylist()
    rows = []
    for step in range(steps):
        for group in range(groups):
            problem = everything[(step * groups + group) % len(everything)]
            for sample in range(samples):
                correct = bool(rng.random() < (step + 1) / steps)
                changes = {"step": step, "group": f"{step}-{group}", "stage": "rl@1"}
                rows.append(rollout(problem, sample, correct, **changes))
    return table(rows, ROLLOUT)


def make_decisions(problems: pa.Table, samples: int = 4) -> pa.Table:
    rng = np.random.default_rng(1)
    rows = []
    for problem in problems.to_pylist():
        solved = int(rng.integers(samples + 1))
        kept = 0 < solved < samples
        rows.append(
            {
                "id": content_id("decision", problem["id"]),
                "parents": [problem["id"]],
                "problem_id": problem["id"],
                "family": problem["family"],
                "level": problem["level"],
                "kept": kept,
                "reason": "" if kept else "never or always solved",
                "pass_rate": solved / samples,
                "samples": samples,
            }
        )
    return table(rows, DECISION)


@pytest.fixture
def build() -> SimpleNamespace:
    """The builders above, for tests that need other tables than the fixtures below."""
    return SimpleNamespace(
        problems=make_problems,
        rollout=rollout,
        samples=make_samples,
        training=make_training,
        decisions=make_decisions,
    )


@pytest.fixture
def problems() -> pa.Table:
    return make_problems()


@pytest.fixture
def checkpoints(problems: pa.Table) -> dict[str, pa.Table]:
    rates = {"base": 0.0, "sft": 0.4, "rl@1": 0.7, "rl@2": 0.9, "student": 0.8}
    return {name: make_samples(problems, rate, seed=i) for i, (name, rate) in enumerate(rates.items())}


@pytest.fixture
def parameters() -> dict[str, int]:
    return {"base": 560_000, "sft": 560_000, "rl@1": 560_000, "rl@2": 560_000, "student": 240_000}
