"""Plots: the numbers behind them by hand, equal bytes, and every awkward input still a picture."""

from __future__ import annotations

import struct
from types import SimpleNamespace as Builders

import numpy as np
import pyarrow as pa
import pytest

from pipelines.evaluate import curves, plots, summary
from pipelines.records import DECISION, ROLLOUT, table

SEED = {"seed": 7, "resamples": 100}


def size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_the_same_numbers_give_the_same_bytes(
    build: Builders, problems: pa.Table, checkpoints: dict, parameters: dict
) -> None:
    import matplotlib

    metrics = summary.summarise(checkpoints, parameters=parameters, **SEED)
    training = {name: curves.training_curve(build.training(problems)) for name in ("rl@1", "rl@2")}
    decisions = build.decisions(problems)
    first = plots.draw(metrics, training, decisions)
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red"}):  # what a user may have set
        second = plots.draw(metrics, training, decisions)
        assert matplotlib.rcParams["font.size"] == 30
    assert list(first) == ["accuracy", "levels", "pass_at_k", "training", "pass_rates"]
    assert first == second
    for png in first.values():
        assert size(png)[0] == plots.WIDTH * plots.DPI
        assert b"Software" not in png and b"matplotlib" not in png


def test_plots_without_data_are_left_out(checkpoints: dict, parameters: dict) -> None:
    metrics = summary.summarise(checkpoints, parameters=parameters, **SEED)
    assert list(plots.draw(metrics)) == ["accuracy", "levels", "pass_at_k"]


@pytest.mark.parametrize("rate", [0.0, 1.0])
@pytest.mark.parametrize("families", [("one",), tuple(f"family_{i}$x$" for i in range(9))])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_single_checkpoint_at_the_ends_of_the_scale(
    build: Builders, rate: float, families: tuple[str, ...], samples: int
) -> None:
    problems = build.problems(per_level=1, families=families, levels=1)
    rows = {"base": build.samples(problems, rate, samples=samples)}
    drawn = plots.draw(summary.summarise(rows, parameters={"base": 1}, **SEED))
    assert all(size(png)[1] > 100 for png in drawn.values())
    assert ("pass_at_k" in drawn) == (samples > 1)  # one point is no curve


def test_training_curve_by_hand(build: Builders) -> None:
    one, two = build.problems(per_level=1, families=("a", "b"), levels=1).to_pylist()
    rows = [
        build.rollout(one, 0, True, step=1, group="1", reward=1.0),
        build.rollout(one, 1, False, step=1, group="1", reward=0.0),
        build.rollout(two, 0, False, step=1, group="2", reward=0.5),
        build.rollout(two, 1, False, step=1, group="2", reward=0.5),
        build.rollout(two, 0, True, step=3, group="3", reward=1.0),
        build.rollout(two, 2, True, step=3, group="3", reward=2.0),
    ]
    curve = curves.training_curve(table(rows, ROLLOUT))
    np.testing.assert_array_equal(curve.step, [1, 3])
    np.testing.assert_allclose(curve.correct, [0.25, 1.0])
    np.testing.assert_allclose(curve.reward, [0.5, 1.5])
    np.testing.assert_allclose(curve.tokens, [3.5, 4.0])  # 3 + sample tokens each
    np.testing.assert_allclose(curve.uniform_groups, [0.5, 1.0])
    np.testing.assert_allclose(curve.families["a"], [0.5, np.nan])
    np.testing.assert_allclose(curve.families["b"], [0.0, 1.0])


def test_smoothing_is_a_moving_mean_that_skips_what_is_absent() -> None:
    np.testing.assert_allclose(curves.smooth(np.arange(40.0)), [1, 1.5, *range(2, 38), 37.5, 38])
    np.testing.assert_allclose(curves.smooth(np.array([1.0, np.nan, 3.0])), [1, np.nan, 3])
    gap = np.full(20, 2.0)
    gap[10] = np.nan
    np.testing.assert_allclose(curves.smooth(gap), np.full(20, 2.0))


def test_a_family_that_is_absent_from_the_last_step_keeps_its_label(build: Builders) -> None:
    one, two = build.problems(per_level=1, families=("a", "b"), levels=1).to_pylist()
    rows = [build.rollout(one, 0, True, step=0), build.rollout(two, 0, True, step=1)]
    assert size(plots.training_curves({"rl@1": curves.training_curve(table(rows, ROLLOUT))}))[1] > 100


def decision(build: Builders, problem: dict, rate: float, samples: int) -> dict:
    (row,) = build.decisions(table([problem], build.problems().schema), samples).to_pylist()
    return row | {"pass_rate": rate, "kept": 0 < rate < 1, "samples": samples}


def test_solved_counts_by_hand(build: Builders, problems: pa.Table) -> None:
    first, second, third, *_ = problems.to_pylist()  # levels 1, 1, 2 of one family
    rows = [decision(build, p, rate, 4) for p, rate in [(first, 0.0), (second, 0.5), (third, 0.5), (third, 1.0)]]
    (found,) = curves.solved_counts(table(rows, DECISION)).values()
    assert (found.levels, found.bins) == ([1, 2], ["0/4", "1/4", "2/4", "3/4", "4/4"])
    np.testing.assert_array_equal(found.count_B_L, [[1, 0], [0, 0], [1, 1], [0, 0], [0, 1]])
    np.testing.assert_array_equal(found.kept_B_L, [[0, 0], [0, 0], [1, 1], [0, 0], [0, 0]])


def test_many_samples_share_ten_bins_between_never_and_always(build: Builders, problems: pa.Table) -> None:
    rates = [0.0, 1 / 64, 0.3, 63 / 64, 1.0]
    rows = [decision(build, problems.to_pylist()[0], rate, 64) for rate in rates]
    (found,) = curves.solved_counts(table(rows, DECISION)).values()
    where = [found.bins[b] for b in np.flatnonzero(found.count_B_L[:, 0])]
    assert where == ["never", "0-10%", "30-40%", "90-100%", "always"]


def test_labels_are_pushed_apart_no_further_than_needed() -> None:
    assert plots.spread([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
    np.testing.assert_allclose(plots.spread([0.5, 0.5], 0.1), [0.45, 0.55])
    np.testing.assert_allclose(plots.spread([0.52, 0.5, 0.51], 0.1), [0.61, 0.41, 0.51])
    crowded = np.sort(plots.spread(list(np.random.default_rng(0).random(12)), 0.08))
    assert (np.diff(crowded) >= 0.08 - 1e-12).all()


def test_every_checkpoint_of_a_run_has_its_own_colour() -> None:
    names = ["base", "sft", "rl@1", "rl@2", "rl@3", "student"]
    assert len(set(plots.colours(names).values())) == len(names)
