"""The weighted sum of reward parts, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.rewards.compose import compose


def test_weighted_sum():
    parts = {"verifier": np.array([1.0, 0.0]), "reward_model": np.array([0.5, 0.25])}
    np.testing.assert_allclose(compose(parts, {"verifier": 1.0, "reward_model": 0.2}), [1.1, 0.05])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="'verifier' has 1 values that are NaN or infinite"):
        compose({"verifier": np.array([1.0, bad])}, {"verifier": 1.0})


def test_parts_of_different_length_are_refused():
    with pytest.raises(ValueError, match="different lengths"):
        compose({"a": np.ones(2), "b": np.ones(1)}, {"a": 1.0, "b": 1.0})


def test_a_part_without_weight_is_refused():
    with pytest.raises(ValueError, match="'b' has no weight"):
        compose({"a": np.ones(2), "b": np.ones(2)}, {"a": 1.0})
