"""From the samples of every checkpoint to the numbers of metrics.json, whose shape is docs/metrics.md.

P problems · N samples of a problem · M measures side by side
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipelines.environments.verifiers import final_answer
from pipelines.evaluate import statistics
from pipelines.evaluate.statistics import Estimate

_DIGITS = 6
_BATCH = 4096  # rows whose masks are unpacked at a time


@dataclass(frozen=True)
class Samples:
    """The samples of one checkpoint as arrays, problems in the order of their ids."""

    problem_P: NDArray[np.object_]
    family_P: NDArray[np.object_]
    level_P: NDArray[np.int64]
    correct_P_N: NDArray[np.bool_]
    answer_P_N: NDArray[np.object_]
    length_P_N: NDArray[np.int64]
    stopped_P_N: NDArray[np.bool_]
    score_P_N: NDArray[np.float64] | None


def arrange(table: pa.Table) -> Samples:
    """The rows of a records.ROLLOUT table as arrays.

    Raises ValueError when problems have different numbers of samples, a sample is there twice, or only some
    samples have a reward model score.
    """
    if table.num_rows == 0:
        raise ValueError("there are no samples")
    table = table.sort_by([("problem_id", "ascending"), ("sample", "ascending")])
    problems, counts = np.unique(column(table, "problem_id"), return_counts=True)
    if counts.min() != counts.max():
        raise ValueError(f"problems have between {counts.min()} and {counts.max()} samples; each needs as many")
    shape = (len(problems), int(counts[0]))
    if not (column(table, "sample").reshape(shape) == np.arange(shape[1])).all():
        raise ValueError(f"the samples of a problem are not numbered 0 to {shape[1] - 1}")

    scores = pc.map_lookup(table["reward_parts"].combine_chunks(), pa.scalar("reward_model"), "first")
    if 0 < scores.null_count < table.num_rows:
        raise ValueError(f"{scores.null_count} of {table.num_rows} samples have no reward model score")
    stopped = column(table, "finish_reason") == "stop"
    texts = table["text"].to_pylist()
    answers = [answer_of(text, finished) for text, finished in zip(texts, stopped, strict=True)]
    return Samples(
        problem_P=problems,
        family_P=column(table, "family").reshape(shape)[:, 0],
        level_P=column(table, "level").reshape(shape)[:, 0].astype(np.int64),
        correct_P_N=column(table, "correct").astype(bool).reshape(shape),
        answer_P_N=np.array(answers, object).reshape(shape),
        length_P_N=completion_lengths(table).reshape(shape),
        stopped_P_N=stopped.reshape(shape),
        score_P_N=None if scores.null_count else np.asarray(scores, np.float64).reshape(shape),
    )


def column(table: pa.Table, name: str) -> NDArray[Any]:
    """A column as a NumPy array (text as objects)."""
    return table[name].combine_chunks().to_numpy(zero_copy_only=False)


def completion_lengths(table: pa.Table) -> NDArray[np.int64]:
    """Number of tokens that the policy wrote, per row."""
    lengths = [np.zeros(0, np.int64)]
    for batch in table.select(["action_mask"]).to_batches(max_chunksize=_BATCH):
        masks = batch.column(0)
        row_T = pc.list_parent_indices(masks).to_numpy()
        written_T = masks.flatten().to_numpy(zero_copy_only=False).astype(bool)
        lengths.append(np.bincount(row_T[written_T], minlength=len(masks)).astype(np.int64))
    return np.concatenate(lengths)


def answer_of(text: str, finished: bool = True) -> str:
    """What a completion answers, as its verifier reads it; empty when it was cut or only thought."""
    return (final_answer(text) or "") if finished else ""


def summarise(
    samples: Mapping[str, pa.Table],
    *,
    parameters: Mapping[str, int],
    seed: int,
    resamples: int = statistics.RESAMPLES,
    parents: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The contents of metrics.json.

    samples: checkpoint name -> records.ROLLOUT table of its samples, oldest checkpoint first; every table has
    the same problems. parameters: name -> parameter count. seed: of the bootstrap. parents: name -> the
    checkpoint it was trained from (`default_parents` of the names when left out). Raises ValueError when the
    tables do not have the same problems.
    """
    arranged = {name: arrange(table) for name, table in samples.items()}
    first = next(iter(arranged.values()))
    for name, one in arranged.items():
        if not np.array_equal(one.problem_P, first.problem_P):
            raise ValueError(f"{name} was not sampled on the same problems as {next(iter(arranged))}")
    values = {name: _values(one) for name, one in arranged.items()}
    pairs = compared(list(samples), parents)

    measures = {(name, measure): value_P for name in values for measure, value_P in values[name].items()}
    measures |= {pair: values[pair[0]]["accuracy"] - values[pair[1]]["accuracy"] for pair in pairs}
    overall = _estimates(measures, np.arange(len(first.problem_P)), seed, resamples)
    judged = {key: measures[key] for key in [(name, "accuracy") for name in arranged] + pairs}
    families = {
        str(family): _estimates(judged, np.flatnonzero(first.family_P == family), seed, resamples)
        for family in sorted(set(first.family_P))
    }
    accuracies = {(name, "accuracy"): measures[name, "accuracy"] for name in arranged}
    levels = {
        family: {
            str(level): _estimates(accuracies, _where(first, family, level), seed, resamples)
            for level in sorted(set(first.level_P[first.family_P == family].tolist()))
        }
        for family in families
    }
    return {
        "checkpoints": {
            name: {
                **_overall(one, {measure: overall[name, measure] for measure in values[name]}),
                "families": {family: _accuracy(found, name) for family, found in families.items()},
                "levels": {
                    family: {level: _accuracy(found, name) for level, found in by_level.items()}
                    for family, by_level in levels.items()
                },
                "parameters": int(parameters[name]),
            }
            for name, one in arranged.items()
        },
        "comparisons": [
            {
                "a": a,
                "b": b,
                "difference": _plain(overall[a, b]),
                "families": {family: {"difference": _plain(found[a, b])} for family, found in families.items()},
            }
            for a, b in pairs
        ],
    }


def ks(samples: int) -> list[int]:
    """The k of pass@k for N samples: powers of two up to N, and N."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples})


def default_parents(names: Sequence[str]) -> dict[str, str]:
    """Each checkpoint's predecessor in a list that runs base, sft, rl@1, rl@2, ..., student."""
    return dict(zip(names[1:], names[:-1], strict=True))


def compared(names: Sequence[str], parents: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Pairs (a, b) whose accuracies are compared as a - b.

    Each checkpoint with its parent, the last RL round with sft, the student with the last RL round; every
    pair once, and only between checkpoints that are there.
    """
    parents = default_parents(names) if parents is None else parents
    pairs = [(name, parents[name]) for name in names if name in parents]
    rounds = [name for name in names if name.startswith("rl@")]
    if rounds:
        pairs += [(rounds[-1], "sft"), ("student", rounds[-1])]
    return list(dict.fromkeys((a, b) for a, b in pairs if a in names and b in names))


def _overall(one: Samples, found: Mapping[str, Estimate]) -> dict[str, Any]:
    """What metrics.json says of a checkpoint over all problems."""
    count = one.correct_P_N.shape[1]
    stopped = one.stopped_P_N.mean()
    return {
        "accuracy": _plain(found["accuracy"]),
        "pass_at_k": {str(k): _rounded(statistics.pass_at_k(one.correct_P_N, k).mean()) for k in ks(count)},
        "majority": {"k": count, **_plain(found["majority"])},
        "best_of_n": {"k": count, **_plain(found["best_of_n"])} if "best_of_n" in found else None,
        "length": {**_plain(found["length"]), **_spread(one.length_P_N)},
        "finish": {"stop": _rounded(stopped), "length": _rounded(1 - stopped)},
    }


def _accuracy(found: Mapping[tuple[str, str], Estimate], name: str) -> dict[str, Any]:
    return {"accuracy": _plain(found[name, "accuracy"])}


def _values(one: Samples) -> dict[str, statistics.Floats]:
    """Every measure with an interval, as one value per problem."""
    values = {
        "accuracy": statistics.accuracy(one.correct_P_N),
        "majority": statistics.majority(one.correct_P_N, one.answer_P_N),
        "length": statistics.mean_length(one.length_P_N),
    }
    if one.score_P_N is not None:
        values["best_of_n"] = statistics.best_of_k(one.correct_P_N, one.score_P_N, one.correct_P_N.shape[1])
    return values


def _estimates(
    measures: Mapping[tuple[str, str], statistics.Floats],
    chosen: NDArray[np.int64],
    seed: int,
    resamples: int,
) -> dict[tuple[str, str], Estimate]:
    """Mean and interval of each measure over the chosen problems, all measures resampled together."""
    value_P_M = np.stack([value_P[chosen] for value_P in measures.values()], axis=1)
    return dict(zip(measures, statistics.estimates(value_P_M, seed, resamples), strict=True))


def _where(samples: Samples, family: str, level: int) -> NDArray[np.int64]:
    return np.flatnonzero((samples.family_P == family) & (samples.level_P == level))


def _spread(length_P_N: NDArray[np.int64]) -> dict[str, float]:
    median, high = np.quantile(length_P_N, [0.5, 0.95])
    return {"median": _rounded(median), "p95": _rounded(high), "max": int(length_P_N.max())}


def _plain(found: Estimate) -> dict[str, float | int]:
    return {
        "mean": _rounded(found.mean),
        "low": _rounded(found.low),
        "high": _rounded(found.high),
        "n": found.n,
    }


def _rounded(number: float) -> float:
    """Six decimals: far below any interval, far above the last bits in which two machines may differ."""
    return round(float(number), _DIGITS) + 0.0  # adding 0 turns -0.0 into 0.0
