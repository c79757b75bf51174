"""Rollouts of problems: sample with an engine, verify, lay out as records. Every stage that samples uses this."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.base.tokenizer import encode_prompts
from pipelines.environments.verifiers import verify_batch
from pipelines.errors import UserError
from pipelines.generation.engine import Engine, Prompt, sample_key
from pipelines.generation.settings import Sampling
from pipelines.records import ROLLOUT, content_id
from pipelines.training.batch import epoch_order


@dataclass(frozen=True)
class EncodedProblems:
    """Problems with their prompts as token ids, in the order of the table they came from."""

    rows: list[dict[str, Any]]  # rows of records.PROBLEM
    tokens: list[list[int]]

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: Sequence[int]) -> EncodedProblems:
        return EncodedProblems([self.rows[i] for i in indices], [self.tokens[i] for i in indices])


def encode_problems(tokenizer, problems: pa.Table) -> EncodedProblems:
    """The problems of a records.PROBLEM table with encoded prompts."""
    rows = problems.to_pylist()
    return EncodedProblems(rows, encode_prompts(tokenizer, [row["prompt"] for row in rows]))


def choose(problems: pa.Table, split: str, count: int, seed: int) -> pa.Table:
    """At most `count` problems of a split, in their order; which ones depends on (seed, how many there are) only."""
    found = problems.filter(pc.equal(problems["split"], split))
    return found.take(pa.array(np.sort(epoch_order(seed, 0, found.num_rows)[:count])))


def sample_rollouts(
    engine: Engine,
    tokenizer,
    problems: EncodedProblems,
    samples: int,
    sampling: Sampling,
    *,
    seed: int,
    stage: str,
    step: int = 0,
) -> list[dict[str, Any]]:
    """`samples` verified single-turn rollouts per problem, problem-major, as rows of records.ROLLOUT.

    The reward is the verifier's (part "verifier"); advantages are 0 and nothing counts as trained on yet.
    Raises UserError when there is no problem to sample.
    """
    if not len(problems):
        raise UserError(f"{stage}: there is no problem to sample answers for; loosen filter.keep or make more problems")
    seen: Counter[str] = Counter()
    first_samples = []  # a problem that comes up twice goes on counting, so no two of its samples are the same draw
    for row in problems.rows:
        first_samples.append(samples * seen[row["id"]])
        seen[row["id"]] += 1
    prompts = [
        Prompt(tokens, tuple(sample_key(seed, stage, step, row["id"], first + i) for i in range(samples)))
        for row, tokens, first in zip(problems.rows, problems.tokens, first_samples, strict=True)
    ]
    drawn = engine.generate(prompts, sampling)
    texts = tokenizer.batch_decode(drawn.tokens, skip_special_tokens=False)
    ends = [tokenizer.eos_token, tokenizer.pad_token]
    texts = [_without_end(text, ends) for text in texts]
    expanded = [row for row in problems.rows for _ in range(samples)]
    verdicts = verify_batch(
        texts,
        [row["answer"] for row in expanded],
        [row["verifier"] for row in expanded],
        [row["verifier_args"] for row in expanded],
        [reason == "stop" for reason in drawn.finish_reasons],
    )
    rows = []
    for index, (problem, text, verdict) in enumerate(zip(expanded, texts, verdicts, strict=True)):
        prompt, completion = problems.tokens[index // samples], drawn.tokens[index]
        first = first_samples[index // samples]
        group = content_id("group", stage, step, problem["id"], first)
        rows.append(
            {
                "id": content_id("rollout", group, first + index % samples, completion),
                "parents": [problem["id"]],
                "problem_id": problem["id"],
                "family": problem["family"],
                "level": problem["level"],
                "group": group,
                "stage": stage,
                "step": step,
                "sample": first + index % samples,
                "policy_version": drawn.policy_version,
                "prompt_tokens": len(prompt),
                "tokens": prompt + completion,
                "action_mask": [False] * len(prompt) + [True] * len(completion),
                "logprobs": [0.0] * len(prompt) + drawn.logprobs[index],
                "turn_starts": [len(prompt)],
                "state_keys": [problem["id"]],
                "text": text,
                "finish_reason": drawn.finish_reasons[index],
                "correct": verdict.correct,
                "verdict": verdict.reason,
                "reward": verdict.score,
                "reward_parts": [("verifier", verdict.score)],
                "advantage": 0.0,
                "trained_steps": [],
                "untrained_reason": "not sampled for training",
            }
        )
    return rows


def sample_in_parts(
    engine: Engine,
    tokenizer,
    problems: EncodedProblems,
    samples: int,
    sampling: Sampling,
    *,
    seed: int,
    stage: str,
    progress: Callable[[int, int, str], None],
    part: int = 64,
) -> list[dict[str, Any]]:
    """`sample_rollouts` over all `problems`, `part` at a time, with `progress(done, total, "problems")` in between."""
    rows: list[dict[str, Any]] = []
    for start in range(0, max(1, len(problems)), part):
        chosen = problems.take(range(start, min(start + part, len(problems))))
        rows += sample_rollouts(engine, tokenizer, chosen, samples, sampling, seed=seed, stage=stage)
        progress(start + len(chosen), len(problems), "problems")
    return rows


def correct_matrix(rows: Sequence[dict[str, Any]], samples: int) -> np.ndarray:
    """correct_P_G: which of the `samples` rollouts of each problem the verifier accepted, bool, problem-major."""
    return np.array([row["correct"] for row in rows], dtype=bool).reshape(-1, samples)


def rollout_table(rows: list[dict[str, Any]]) -> pa.Table:
    """The rows as a table of records.ROLLOUT."""
    return pa.Table.from_pylist(rows, schema=ROLLOUT)


def _without_end(text: str, ends: Sequence[str | None]) -> str:
    for end in ends:
        if end and text.endswith(end):
            text = text[: -len(end)]
    return text
