"""Sampled completions as HTML: every checkpoint's answer to the same problem, side by side.

Prompts and completions are untrusted text. They reach the page through `visible` alone.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_LONGEST = 4000  # characters of one completion
_MOST_SAMPLES = 4  # completions of one checkpoint for one problem
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | {0x7F: "␡"}
_HIDDEN = re.compile("[\u0080-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def visible(text: str) -> str:
    """Escaped text in which nothing is markup, nothing is invisible and nothing reorders what surrounds it."""
    shown = text.translate(_PICTURES)
    shown = _HIDDEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", shown)
    return html.escape(shown)


def chosen(problems: pa.Table, each: int) -> dict[str, list[dict[str, Any]]]:
    """Up to `each` problems per family, from easy to hard and, at one level, by id: never by how they were answered."""
    found = {}
    for family in sorted(set(problems["family"].to_pylist())):
        rows = problems.filter(pc.equal(problems["family"], family)).to_pylist()
        rows.sort(key=lambda row: (row["level"], row["id"]))
        places = np.linspace(0, len(rows) - 1, min(each, len(rows))).round().astype(int)
        found[family] = [rows[place] for place in places]
    return found


def section(samples: Mapping[str, pa.Table], problems: pa.Table, each: int) -> str:
    """Every family's chosen problems with the completions of each checkpoint."""
    asked = pc.unique(next(iter(samples.values()))["problem_id"])
    families = chosen(problems.filter(pc.is_in(problems["id"], asked)), each)
    ids = pa.array([row["id"] for rows in families.values() for row in rows], pa.string())
    wanted = {name: _by_problem(table, ids) for name, table in samples.items()}
    parts = []
    for family, rows in families.items():
        parts.append(f"<h3>{visible(family)}</h3>")
        parts += [_problem(row, {name: found[row["id"]] for name, found in wanted.items()}) for row in rows]
    return "\n".join(parts)


def _by_problem(samples: pa.Table, ids: pa.Array) -> dict[str, list[dict[str, Any]]]:
    """The samples of the given problems only, as rows in the order of their index."""
    columns = ["problem_id", "sample", "correct", "verdict", "text", "finish_reason", "reward_parts"]
    rows = samples.select(columns).filter(pc.is_in(samples["problem_id"], ids)).to_pylist()
    found: dict[str, list[dict[str, Any]]] = {problem: [] for problem in ids.to_pylist()}
    for row in sorted(rows, key=lambda row: row["sample"]):
        found[row["problem_id"]].append(row)
    return found


def _problem(row: Mapping[str, Any], answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    cards = "\n".join(_card(name, found) for name, found in answers.items())
    return (
        f'<article><header><span class="badge">level {row["level"]}</span>'
        f'<div class="prompt" dir="auto">{visible(row["prompt"])}</div>'
        f'<div class="key">answer <b><bdi>{visible(row["answer"])}</bdi></b></div></header>\n'
        f'<div class="cards">{cards}</div></article>'
    )


def _card(name: str, samples: Sequence[Mapping[str, Any]]) -> str:
    right = sum(one["correct"] for one in samples)
    more = samples[1:_MOST_SAMPLES]
    folded = f"<details><summary>{len(more)} more</summary>{''.join(map(_completion, more))}</details>" if more else ""
    share = f'<span class="of">{right} of {len(samples)} right</span>'
    return f'<section class="card"><h4>{visible(name)} {share}</h4>{_completion(samples[0])}{folded}</section>'


def _completion(one: Mapping[str, Any]) -> str:
    text = one["text"]
    cut = len(text) - _LONGEST
    if cut > 0:  # keep both ends: the start shows how it thinks, the end what it answers
        text = f"{text[: _LONGEST // 2]}\n[{cut} characters left out]\n{text[-_LONGEST // 2 :]}"
    before, marker, answer = text.rpartition("</think>")
    thought = f'<span class="thought">{visible(before + marker)}</span>' if marker else ""
    mark, label = ("✓", "right") if one["correct"] else ("✗", one["verdict"])
    notes = [f'<b class="mark" aria-hidden="true">{mark}</b> {visible(label)}']
    if one["finish_reason"] == "length":
        notes.append("cut at the token limit")
    score = dict(one["reward_parts"]).get("reward_model")
    if score is not None:
        notes.append(f"score {score:+.2f}".replace("-", "−"))
    kind = "right" if one["correct"] else "wrong"
    body = f"{thought}<span class='answer'>{visible(answer)}</span>" if text else "<i>empty</i>"
    return f'<div class="completion {kind}"><p>{" · ".join(notes)}</p><pre dir="auto">{body}</pre></div>'
