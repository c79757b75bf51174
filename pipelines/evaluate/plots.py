"""The plots of an evaluation as PNG, the same bytes for the same numbers.

Colours are Okabe and Ito's, told apart with any colour vision; every checkpoint also has its own marker, and
lines carry their name at their end instead of a legend.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipelines.evaluate.curves import TrainingCurve, smooth, solved_counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
WIDTH = 8.0  # inches
_INK, _FAINT = "#222222", "#dddddd"
_GREY, _BLUE, _ORANGE, _VERMILION, _GREEN, _PURPLE = (
    "#767676",
    "#0072b2",
    "#e69f00",
    "#d55e00",
    "#009e73",
    "#cc79a7",
)
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "text.parse_math": False,
    "axes.labelcolor": _INK,
    "axes.labelsize": 9,
    "axes.edgecolor": "#888888",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": _FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


def draw(
    metrics: Mapping[str, Any],
    training: Mapping[str, TrainingCurve] | None = None,
    decisions: pa.Table | None = None,
) -> dict[str, bytes]:
    """Every plot there is data for, by name: accuracy, levels, pass_at_k, training, pass_rates.

    metrics: what metrics.json holds. training: the curves of each RL round, first round first. decisions: the
    records.DECISION table of the filter stage.
    """
    plots = {
        "accuracy": accuracy(metrics["checkpoints"]),
        "levels": levels(metrics["checkpoints"]),
    }
    if any(len(one["pass_at_k"]) > 1 for one in metrics["checkpoints"].values()):
        plots["pass_at_k"] = pass_at_k(metrics["checkpoints"])
    if training:
        plots["training"] = training_curves(training)
    if decisions is not None and decisions.num_rows:
        plots["pass_rates"] = pass_rates(decisions)
    return plots


def accuracy(checkpoints: Mapping[str, Any]) -> bytes:
    """Accuracy of each checkpoint with its interval, over all problems and in each family."""
    names = list(checkpoints)
    families = list(next(iter(checkpoints.values()))["families"])
    panels = [("all problems", [one["accuracy"] for one in checkpoints.values()])]
    if len(families) > 1:
        for family in families:
            panels.append((family, [one["families"][family]["accuracy"] for one in checkpoints.values()]))
    colour = colours(names)
    height = 0.55 + 0.27 * len(names)
    with _drawn(_grid(len(panels), 4), height, "Accuracy, with 95% interval", sharey=True) as (figure, axes):
        for axis, (title, found) in zip(axes, panels, strict=True):
            axis.set_title(_short(title))
            for row, (name, one) in enumerate(zip(names, found, strict=True)):
                axis.plot([one["low"], one["high"]], [row, row], color=colour[name], linewidth=2.4)
                axis.plot(one["mean"], row, _marker(name), color=colour[name], markersize=6, clip_on=False)
                place = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 8}
                axis.annotate(_percent(one["mean"]), (1.03, row), **place)
            axis.set_yticks(range(len(names)), names)
            axis.tick_params(axis="y", length=0, labelsize=9)
            axis.set_ylim(len(names) - 0.5, -0.5)
            axis.grid(visible=False, axis="y")
            axis.spines["left"].set_visible(False)
            _shares(axis.xaxis, axis.set_xlim)
        return _png(figure)


def pass_at_k(checkpoints: Mapping[str, Any]) -> bytes:
    """pass@k over k on a logarithmic axis, a line per checkpoint."""
    colour = colours(list(checkpoints))
    with _drawn(_grid(1, 1), 2.7, "pass@k: at least one of k samples is right") as (figure, (axis,)):
        ends = {}
        for name, one in checkpoints.items():
            k = [int(key) for key in one["pass_at_k"]]
            value = list(one["pass_at_k"].values())
            axis.plot(k, value, _marker(name) + "-", color=colour[name], clip_on=False)
            ends[name] = (k[-1], value[-1])
        axis.set_xscale("log", base=2)
        ticks = sorted({int(key) for one in checkpoints.values() for key in one["pass_at_k"]})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.set_xlabel("k")
        _shares(axis.yaxis, axis.set_ylim)
        _label_ends(axis, ends, colour, gap=0.065)
        return _png(figure)


def levels(checkpoints: Mapping[str, Any]) -> bytes:
    """Accuracy over difficulty level, a panel per family and a line per checkpoint."""
    names = list(checkpoints)
    families = list(next(iter(checkpoints.values()))["levels"])
    colour = colours(names)
    with _drawn(_grid(len(families), 3), 2.3, "Accuracy by difficulty level", sharey=True) as (figure, axes):
        for axis, family in zip(axes, families, strict=True):
            axis.set_title(_short(family))
            ends = {}
            shown = [int(level) for level in checkpoints[names[0]]["levels"][family]]
            for i, name in enumerate(names):
                found = [one["accuracy"] for one in checkpoints[name]["levels"][family].values()]
                mean = [one["mean"] for one in found]
                shift = (i - (len(names) - 1) / 2) * 0.05
                place = [level + shift for level in shown]
                axis.vlines(
                    place,
                    [one["low"] for one in found],
                    [one["high"] for one in found],
                    color=colour[name],
                    linewidth=1,
                    alpha=0.55,
                )
                axis.plot(
                    place, mean, _marker(name) + "-", color=colour[name], markersize=4, linewidth=1.5, clip_on=False
                )
                ends[name] = (place[-1], mean[-1])
            axis.set_xticks(shown)
            axis.set_xlabel("level")
            axis.set_xlim(shown[0] - 0.3, shown[-1] + 0.3)
            _shares(axis.yaxis, axis.set_ylim)
            _label_ends(axis, ends, colour, gap=0.095)
        return _png(figure)


def training_curves(rounds: Mapping[str, TrainingCurve]) -> bytes:
    """How the RL rounds went, one after the other along the steps."""
    panels = {
        "share correct": "correct",
        "mean reward": "reward",
        "completion tokens": "tokens",
        "groups all right or wrong": "uniform_groups",
    }
    starts = np.cumsum([0] + [len(curve.step) for curve in rounds.values()])
    layout = [["correct"] * 3, ["reward", "tokens", "uniform"]]
    with _drawn(layout, 2.1, "RL training, per step and smoothed") as (figure, axes):
        for axis, (title, field) in zip(axes, panels.items(), strict=True):
            axis.set_title(title)
            for curve, start in zip(rounds.values(), starts[:-1], strict=True):
                x_S = start + np.arange(len(curve.step))
                value_S = getattr(curve, field)
                if field == "correct" and len(curve.families) > 1:
                    for i, family_S in enumerate(curve.families.values()):
                        axis.plot(x_S, smooth(family_S), color=_family_colour(i), linewidth=1.2)
                else:
                    axis.plot(x_S, value_S, color=_BLUE, alpha=0.25, linewidth=0.8)
                axis.plot(x_S, smooth(value_S), color=_INK if field == "correct" else _BLUE)
            axis.set_xlim(0, max(starts[-1] - 1, 1))
            if field in ("correct", "uniform_groups"):
                _shares(axis.yaxis, axis.set_ylim)
            for start in starts[1:-1]:
                axis.axvline(start, color="#888888", linewidth=0.8, linestyle=(0, (3, 3)))
        last = list(rounds.values())[-1]
        if len(last.families) > 1:
            ends = {family: _last(smooth(family_S)) for family, family_S in last.families.items()}
            tints = {family: _family_colour(i) for i, family in enumerate(ends)}
            ends, tints = {"all": smooth(last.correct)[-1], **ends}, {"all": _INK, **tints}
            _label_ends(axes[0], {name: (starts[-1] - 1, y) for name, y in ends.items()}, tints, gap=0.11)
        if len(rounds) > 1:
            for name, start, end in zip(rounds, starts[:-1], starts[1:], strict=True):
                axes[0].annotate(name, ((start + end) / 2, 1.03), xycoords=("data", "axes fraction"), ha="center")
        for axis in axes[1:]:
            axis.set_xlabel("optimiser step")
        return _png(figure)


def pass_rates(decisions: pa.Table) -> bytes:
    """How often the SFT model solves the training problems of each level, and which of them were kept."""
    counts = solved_counts(decisions)
    bins = next(iter(counts.values())).bins
    title = "Training problems by pass rate before RL: kept in blue, dropped in grey"
    with _drawn(_grid(len(counts), 3), 0.8 + 0.2 * len(bins), title, sharey=True) as (figure, axes):
        for axis, (family, found) in zip(axes, counts.items(), strict=True):
            axis.set_title(_short(family))
            axis.grid(visible=False)
            most = found.count_B_L.max()
            for (b, place), count in np.ndenumerate(found.count_B_L):
                shade = 0.12 + 0.88 * count / most if count else 0.04
                kept = 2 * found.kept_B_L[b, place] > count
                axis.add_patch(_cell(place, b, _mix(_BLUE if kept else _GREY, shade)))
                if count:
                    ink = "white" if shade > 0.6 else _INK
                    axis.text(place, b, str(count), ha="center", va="center", fontsize=7.5, color=ink)
            axis.set_xlim(-0.5, len(found.levels) - 0.5)
            axis.set_ylim(-0.5, len(bins) - 0.5)
            axis.set_xticks(range(len(found.levels)), [str(level) for level in found.levels])
            axis.set_yticks(range(len(bins)), bins)
            axis.tick_params(length=0)
            axis.set_xlabel("level")
            axis.spines[["left", "bottom"]].set_visible(False)
        for axis in axes[::3]:
            axis.set_ylabel("pass rate")
        return _png(figure)


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour per checkpoint: its stage decides, RL rounds run from orange to vermilion."""
    rounds = [name for name in names if name.startswith("rl@")]
    fixed = {"base": _GREY, "sft": _BLUE, "student": _GREEN}
    found = {}
    for name in names:
        if name in rounds:
            share = rounds.index(name) / (len(rounds) - 1) if len(rounds) > 1 else 1.0
            found[name] = _mix(_VERMILION, share, _ORANGE)
        else:
            found[name] = fixed.get(name, _PURPLE)
    return found


@contextmanager
def _drawn(
    layout: list[list[str]], height: float, title: str, sharey: bool = False
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A mosaic of panels, `height` inches a row, in this module's style whatever the user's is."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(WIDTH, 0.45 + len(layout) * height), dpi=DPI, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06, wspace=0.02, hspace=0.04)
        axes = figure.subplot_mosaic(layout, sharey=sharey, empty_sentinel="")
        figure.suptitle(title, x=0.012, ha="left", fontsize=10.5, fontweight="bold")
        yield figure, list(axes.values())


def _grid(panels: int, most_columns: int) -> list[list[str]]:
    """A mosaic of equal panels, filled row by row."""
    columns = min(panels, most_columns)
    names = [str(i) for i in range(panels)] + [""] * (-panels % columns)
    return [names[i : i + columns] for i in range(0, len(names), columns)]


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DPI, metadata={"Software": None})
    return stream.getvalue()


def _marker(name: str) -> str:
    if name.startswith("rl@"):
        return "D"
    return {"base": "o", "sft": "s", "student": "^"}.get(name, "v")


def _family_colour(i: int) -> str:
    return (_BLUE, _VERMILION, _GREEN, _PURPLE, _ORANGE, "#56b4e9")[i % 6]


def _shares(axis: Any, set_limits: Any) -> None:
    set_limits(-0.03, 1.03)
    axis.set_ticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100%"])


def _short(title: str, most: int = 20) -> str:
    """A title that fits over a panel; of a long one both ends, where names differ."""
    return title if len(title) <= most else f"{title[: most // 2]}…{title[-(most - most // 2 - 1) :]}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _last(value_S: np.ndarray) -> float:
    """The last value that is known."""
    return float(value_S[~np.isnan(value_S)][-1])


def _label_ends(axis: Axes, ends: Mapping[str, tuple[float, float]], colour: Mapping[str, str], gap: float) -> None:
    """Name each line at its last point, names pushed apart until they are `gap` of the axis range apart."""
    low, high = axis.get_ylim()
    heights = spread([(y - low) / (high - low) for _, y in ends.values()], gap)
    x = max(x for x, _ in ends.values())
    for (name, (_, y)), height in zip(ends.items(), heights, strict=True):
        axis.annotate(
            name,
            (x, y),
            xytext=(1.02, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=colour[name],
            fontweight="bold",
            annotation_clip=False,
        )


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places moved as little as pleases the eye so that neighbours are at least `gap` apart, order kept."""
    blocks: list[tuple[float, list[int]]] = []  # centre and members of labels that touch
    for index in np.argsort(places, kind="stable").tolist():
        centre, members = float(places[index]), [index]
        while blocks and centre - blocks[-1][0] < gap * (len(members) + len(blocks[-1][1])) / 2:
            below, lower = blocks.pop()
            centre = (centre * len(members) + below * len(lower)) / (len(members) + len(lower))
            members = lower + members
        blocks.append((centre, members))
    found = [0.0] * len(places)
    for centre, members in blocks:
        for position, index in enumerate(members):
            found[index] = centre + gap * (position - (len(members) - 1) / 2)
    return found


def _mix(colour: str, share: float, other: str = "#ffffff") -> str:
    """`share` of a colour and the rest of another, as hex."""
    first, second = (tuple(int(text[i : i + 2], 16) for i in (1, 3, 5)) for text in (colour, other))
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in zip(first, second, strict=True))


def _cell(column: int, row: int, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.47, row - 0.46), 0.94, 0.92, facecolor=colour, edgecolor="none")
