"""report.html: one file that needs no network and no script, the same bytes for the same evaluation."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipelines.evaluate import transcripts as texts
from pipelines.evaluate.style import CSS
from pipelines.evaluate.transcripts import visible

# Even a mistake in escaping could then neither run nor fetch anything.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_FIGURES = {
    "accuracy": (
        "Accuracy of each checkpoint on all problems and by family",
        "Mean accuracy with its 95% interval, over all problems and by family.",
    ),
    "levels": (
        "Accuracy over difficulty level, by family",
        "Accuracy by difficulty level. Bars are 95% intervals; points are set slightly apart so that they stay "
        "visible.",
    ),
    "pass_at_k": (
        "pass@k over k for each checkpoint",
        "Probability that at least one of k samples is right (unbiased estimate). A flat line means that a problem is "
        "solved always or never; lines that meet on the right differ in how often, not in what they can solve.",
    ),
    "training": (
        "Curves of the RL rounds over optimiser steps",
        "Over the rollouts of each step; thick lines are a moving mean. A group whose samples are all right or all "
        "wrong has nothing to learn from.",
    ),
    "pass_rates": (
        "Training problems by pass rate and level",
        "How often the SFT model solved each training problem, as counts by difficulty level. Blue ones were kept for "
        "RL.",
    ),
}


def render(
    metrics: Mapping[str, Any],
    plots: Mapping[str, bytes],
    samples: Mapping[str, pa.Table],
    problems: pa.Table,
    transcripts: int,
) -> str:
    """The page.

    metrics: what metrics.json holds. plots: PNG by name, as `plots.draw` makes them. samples: checkpoint name
    -> records.ROLLOUT table. problems: the records.PROBLEM table they answer. transcripts: problems shown per
    family.
    """
    checkpoints, comparisons = metrics["checkpoints"], metrics["comparisons"]
    sections = {
        "Checkpoints": _figure(plots, "accuracy") + _checkpoint_table(checkpoints),
        "Comparisons": _comparison_table(comparisons) if comparisons else "",
        "Difficulty": _figure(plots, "levels") + _level_table(checkpoints),
        "More samples": _figure(plots, "pass_at_k"),
        "Training": _figure(plots, "training") + _figure(plots, "pass_rates"),
        "Transcripts": _transcripts(samples, problems, transcripts, checkpoints) if transcripts else "",
        "How to read this": _glossary(checkpoints),
    }
    sections = {title: body for title, body in sections.items() if body}
    anchors = {title: title.lower().replace(" ", "-") for title in sections}
    links = "".join(f'<a href="#{anchor}">{title}</a>' for title, anchor in anchors.items())
    parts = [f'<h2 id="{anchors[title]}">{title}</h2>\n{body}' for title, body in sections.items()]
    first = next(iter(checkpoints.values()))
    problem_count, sample_count = first["accuracy"]["n"], first["majority"]["k"]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="ratchet">
<title>{visible(_headline(metrics))}</title>
<style>{CSS}</style>
</head>
<body>
<p class="kicker">Evaluation</p>
<h1>{visible(_headline(metrics))}</h1>
<p class="note">{_counted(problem_count, "held-out problem")}, each answered {_counted(sample_count, "time")} by every
checkpoint. Brackets hold 95% intervals.</p>
{_tiles(metrics)}
<nav aria-label="Sections">{links}</nav>
{"".join(parts)}
</body>
</html>
"""


def _headline(metrics: Mapping[str, Any]) -> str:
    checkpoints = metrics["checkpoints"]
    name = _last_round(checkpoints) or list(checkpoints)[-1]
    accuracy = checkpoints[name]["accuracy"]
    text = f"{name} answers {_percent(accuracy['mean'])} of held-out problems correctly"
    gain = _between(metrics, name, "sft") or _between(metrics, name, "base")
    if gain is None:
        return text
    other = gain["b"]
    points = f"{abs(100 * gain['difference']['mean']):.1f} points"
    relation = {
        "higher": f"{points} more than {other}",
        "lower": f"{points} less than {other}",
        "even": f"not clearly different from {other}",
    }
    return f"{text}, {relation[_direction(gain['difference'])]}"


def _tiles(metrics: Mapping[str, Any]) -> str:
    checkpoints = metrics["checkpoints"]
    name = _last_round(checkpoints)
    tiles = []
    if name and (gain := _between(metrics, name, "sft")):
        tiles.append((_signed(gain["difference"]), f"points, {name} over sft"))
        if len(gain["families"]) > 1:
            family, found = min(gain["families"].items(), key=lambda item: item[1]["difference"]["mean"])
            tiles.append((_signed(found["difference"]), f"points in {family}, the family that gains least"))
    if name and (gap := _between(metrics, "student", name)):
        share = checkpoints["student"]["parameters"] / checkpoints[name]["parameters"]
        text = f"points, student against {name}, with {share:.0%} of its parameters"
        tiles.append((_signed(gap["difference"]), text))
    best = name and checkpoints[name]["best_of_n"]
    if best:
        value = f"{_percent(best['mean'])} <small>{_bracket(best)}</small>"
        tiles.append((value, f"{name}, best of {best['k']} by reward model"))
    if not tiles:
        return ""
    shown = [f'<div class="tile"><b>{value}</b><span>{visible(text)}</span></div>' for value, text in tiles]
    return f'<div class="tiles">{"".join(shown)}</div>'


def _checkpoint_table(checkpoints: Mapping[str, Any]) -> str:
    ks = list(next(iter(checkpoints.values()))["pass_at_k"])
    shown = ks[1:] if len(ks) < 4 else [ks[len(ks) // 2], ks[-1]]
    scored = any(one["best_of_n"] for one in checkpoints.values())
    count = next(iter(checkpoints.values()))["majority"]["k"]
    heads = ["checkpoint", "accuracy", *[f"pass@{k}" for k in shown], f"majority@{count}"]
    heads += [f"best of {count}"] * scored + ["tokens", "cut", "parameters"]
    rows = []
    for name, one in checkpoints.items():
        best = one["best_of_n"]
        cells = [
            _with_interval(one["accuracy"]),
            *[_percent(one["pass_at_k"][k]) for k in shown],
            _with_interval(one["majority"]),
            *([_with_interval(best) if best else "–"] if scored else []),
            f"{one['length']['mean']:.1f}",
            _percent(one["finish"]["length"]),
            f"{one['parameters']:,}",
        ]
        rows.append(f"<tr><th>{visible(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return _table(heads, rows)


def _comparison_table(comparisons: Sequence[Mapping[str, Any]]) -> str:
    differences = [one["difference"] for one in comparisons]
    scale = min(0.0, *(one["low"] for one in differences)), max(0.01, *(one["high"] for one in differences))
    families = list(comparisons[0]["families"])
    heads = ["", "points", "interval", *(families if len(families) > 1 else [])]
    rows = []
    for one in comparisons:
        found = one["difference"]
        kind = _direction(found)
        name = f"{visible(one['a'])} <small>over</small> {visible(one['b'])}"
        cells = [
            f"<td>{_signed(found)}</td>",
            f'<td class="{kind}">{_interval_picture(found, *scale)}</td>',
        ]
        if len(families) > 1:
            by_family = [one["families"][family]["difference"] for family in families]
            cells += [f'<td class="{_direction(each)}">{_signed(each)}</td>' for each in by_family]
        rows.append(f"<tr><th>{name}</th>{''.join(cells)}</tr>")
    note = (
        '<p class="note">Accuracy of the first minus accuracy of the second on the same problems, in percentage '
        'points. Coloured where the interval leaves out zero: <span class="higher">higher</span>, '
        '<span class="lower">lower</span>, <span class="even">not clearly different</span>.</p>'
    )
    return note + _table(heads, rows)


def _level_table(checkpoints: Mapping[str, Any]) -> str:
    first = next(iter(checkpoints.values()))
    rows = []
    for family, by_level in first["levels"].items():
        found = [one["families"][family]["accuracy"] for one in checkpoints.values()]
        rows.append(f"<tr><th>{visible(family)}</th>{_heat(found)}<td>{found[0]['n']}</td></tr>")
        for level in by_level:
            found = [one["levels"][family][level]["accuracy"] for one in checkpoints.values()]
            row = f"<th>level {visible(level)}</th>{_heat(found)}<td>{found[0]['n']}</td>"
            rows.append(f'<tr class="level">{row}</tr>')
    return _table(["", *checkpoints, "problems"], rows, "heat")


def _heat(found: Sequence[Mapping[str, float]]) -> str:
    cell = '<td style="--share:{:.3f}">{}<small>{}</small></td>'
    return "".join(cell.format(one["mean"], _percent(one["mean"]), _bracket(one)) for one in found)


def _transcripts(samples: Mapping[str, pa.Table], problems: pa.Table, each: int, checkpoints: Mapping[str, Any]) -> str:
    note = (
        "Problems are chosen by level and id, not by result, and the first sample of every checkpoint is open. A mark "
        "says what the verifier made of it"
    )
    if any(one["best_of_n"] for one in checkpoints.values()):
        note += "; the score is the reward model's"
    return f'<p class="note">{note}.</p>\n{texts.section(samples, problems, each)}'


def _glossary(checkpoints: Mapping[str, Any]) -> str:
    words = {
        "accuracy": "share of a problem's samples that its verifier accepts, averaged over problems",
        "interval": "95% percentile bootstrap; whole problems are resampled, because the samples of one problem are "
        "not independent. It has no width where every problem came out the same",
        "pass@k": "probability that at least one of k samples is right, estimated without bias (Chen et al. 2021)",
        "majority@n": "accuracy of the most frequent answer of n samples; a tie counts its expected worth",
        "best of n": "accuracy of the sample that the reward model scores highest among n",
        "tokens": "mean number of tokens written per sample",
        "cut": "share of samples that reached the token limit before they ended",
    }
    if not any(one["best_of_n"] for one in checkpoints.values()):
        del words["best of n"]
    entries = "".join(f"<dt>{word}</dt><dd>{meaning}.</dd>" for word, meaning in words.items())
    return f"<dl>{entries}</dl>\n"


def _figure(plots: Mapping[str, bytes], name: str) -> str:
    if name not in plots:
        return ""
    alternative, caption = _FIGURES[name]
    width, height = struct.unpack(">II", plots[name][16:24])
    data = base64.b64encode(plots[name]).decode()
    return (
        f'<figure><img alt="{alternative}" width="{width}" height="{height}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>\n"
    )


def _table(heads: Sequence[str], rows: Sequence[str], kind: str = "") -> str:
    head = "".join(f'<th scope="col">{visible(text)}</th>' for text in heads)
    body = "\n".join(rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>\n"
    )


def _interval_picture(found: Mapping[str, float], least: float, most: float) -> str:
    """A difference and its interval on a scale from `least` to `most`, with a line at zero."""
    width = most - least
    zero, low, mean, high = (
        8 + 184 * (value - least) / width for value in (0.0, found["low"], found["mean"], found["high"])
    )
    return (
        f'<svg class="interval" viewBox="0 0 200 20" aria-hidden="true"><line class="zero" x1="{zero:.1f}" y1="0" '
        f'x2="{zero:.1f}" y2="20"/><line x1="{low:.1f}" y1="10" x2="{high:.1f}" y2="10"/>'
        f'<circle cx="{mean:.1f}" cy="10" r="5"/></svg>'
    )


def _last_round(names: Sequence[str] | Mapping[str, Any]) -> str | None:
    return next((name for name in reversed(list(names)) if name.startswith("rl@")), None)


def _between(metrics: Mapping[str, Any], a: str, b: str) -> Mapping[str, Any] | None:
    return next((one for one in metrics["comparisons"] if (one["a"], one["b"]) == (a, b)), None)


def _direction(found: Mapping[str, float]) -> str:
    if found["low"] > 0:
        return "higher"
    return "lower" if found["high"] < 0 else "even"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _bracket(found: Mapping[str, float]) -> str:
    return f"[{100 * found['low']:.1f}, {100 * found['high']:.1f}]".replace("-", "−")


def _with_interval(found: Mapping[str, float]) -> str:
    return f"{_percent(found['mean'])} <small>{_bracket(found)}</small>"


def _signed(found: Mapping[str, float]) -> str:
    mean = f"{100 * found['mean']:+.1f}".replace("-", "−")
    return f"{mean} <small>{_bracket(found)}</small>"


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"
