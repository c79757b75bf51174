"""PyArrow schemas of everything that crosses a stage border, with content-hash ids.

A row's `id` is a hash of its content and `parents` are the ids of the rows it was made from, so a chain
problem -> decision / demonstration / preference / rollout -> training step -> evaluation sample can be walked by joins.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import UserError

_ID = [
    pa.field("id", pa.string(), nullable=False),
    pa.field("parents", pa.list_(pa.string()), nullable=False),
]
_PROBLEM_KEYS = [
    pa.field("problem_id", pa.string(), nullable=False),
    pa.field("family", pa.string(), nullable=False),
    pa.field("level", pa.int32(), nullable=False),
]

PROBLEM = pa.schema(
    [
        *_ID,
        pa.field("family", pa.string(), nullable=False),
        pa.field("level", pa.int32(), nullable=False),
        pa.field("split", pa.string(), nullable=False),  # train | test
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("answer", pa.string(), nullable=False),
        pa.field("verifier", pa.string(), nullable=False),
        pa.field("verifier_args", pa.string(), nullable=False),  # JSON object
        pa.field("source", pa.string(), nullable=False),  # generator:NAME or file:NAME#ROW
    ]
)

DEMONSTRATION = pa.schema(
    [
        *_ID,
        *_PROBLEM_KEYS,
        pa.field("mode", pa.string(), nullable=False),  # behaviour of the teacher: steps | direct | ...
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("completion", pa.string(), nullable=False),
    ]
)

DECISION = pa.schema(
    [
        *_ID,
        *_PROBLEM_KEYS,
        pa.field("kept", pa.bool_(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("pass_rate", pa.float32(), nullable=False),
        pa.field("samples", pa.int32(), nullable=False),
    ]
)

PREFERENCE = pa.schema(
    [
        *_ID,
        *_PROBLEM_KEYS,
        pa.field("split", pa.string(), nullable=False),  # train | heldout
        pa.field("chosen_id", pa.string(), nullable=False),
        pa.field("rejected_id", pa.string(), nullable=False),
    ]
)

ROLLOUT = pa.schema(
    [
        *_ID,
        *_PROBLEM_KEYS,
        pa.field("group", pa.string(), nullable=False),  # the rollouts of one problem at one step share it
        pa.field("stage", pa.string(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),  # optimiser step that asked for it; 0 outside training
        pa.field("sample", pa.int32(), nullable=False),  # index inside the group
        pa.field("policy_version", pa.int32(), nullable=False),  # optimiser steps behind the behaviour policy
        pa.field("prompt_tokens", pa.int32(), nullable=False),  # how many of `tokens` are the first prompt
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),  # the whole sequence, prompt included
        pa.field("action_mask", pa.list_(pa.bool_()), nullable=False),  # which tokens the policy wrote
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),  # behaviour log-probs, 0 where not an action
        pa.field("turn_starts", pa.list_(pa.int32()), nullable=False),
        pa.field("state_keys", pa.list_(pa.string()), nullable=False),  # environment state per turn
        pa.field("text", pa.string(), nullable=False),  # what the policy wrote, decoded
        pa.field("finish_reason", pa.string(), nullable=False),  # stop | length
        pa.field("correct", pa.bool_(), nullable=False),
        pa.field("verdict", pa.string(), nullable=False),  # the verifier's reason
        pa.field("reward", pa.float32(), nullable=False),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float32()), nullable=False),
        pa.field("advantage", pa.float32(), nullable=False),
        pa.field("trained_steps", pa.list_(pa.int32()), nullable=False),
        pa.field("untrained_reason", pa.string(), nullable=False),  # empty when it was trained on
    ]
)


def content_id(*parts: Any) -> str:
    """The first 16 hex digits of the SHA-256 of the canonical JSON of `parts`."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def problem_id(prompt: str, answer: str, verifier: str, verifier_args: str = "{}") -> str:
    """The id of a problem: what is asked and how an answer is judged, nothing else."""
    return content_id("problem", prompt, answer, verifier, verifier_args)


def table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """`rows` as a table of exactly `schema`; a missing or extra column is an error."""
    names = set(schema.names)
    for row in rows[:1]:
        if row.keys() != names:
            raise ValueError(f"row has columns {sorted(row)}, the schema wants {sorted(names)}")
    return pa.Table.from_pylist(rows, schema=schema)


def write(path: Path, rows: list[dict[str, Any]] | pa.Table, schema: pa.Schema) -> int:
    """Write one Parquet file with the same bytes for the same rows; returns the row count."""
    data = rows if isinstance(rows, pa.Table) else table(rows, schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(data.cast(schema), path, compression="zstd", row_group_size=65536)
    return data.num_rows


def read(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a Parquet file and check that it holds `schema`."""
    try:
        data = pq.read_table(path)
    except FileNotFoundError:
        raise UserError(f"there is no {path}; run the stage that makes it") from None
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} is no readable Parquet file ({reason}); run the stage that makes it again") from error
    if data.schema.names != schema.names:
        raise ValueError(f"{path} has columns {data.schema.names}, expected {schema.names}")
    return data.cast(schema)
