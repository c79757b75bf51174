"""Advantages and policy losses against hand-computed values."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipelines.rl.advantages import group_advantages, informative_groups
from pipelines.rl.losses import behaviour_kl, clip_share, clipped_policy_gradient, kl_to_reference
from pipelines.training.components import Outputs


def inputs(logp, **values):
    batch = SimpleNamespace(values={name: torch.tensor(value) for name, value in values.items()})
    return Outputs(logp_N=torch.tensor(logp, requires_grad=True)), batch


def test_advantages_by_hand():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]])
    np.testing.assert_allclose(group_advantages(rewards, "none"), [[0.5, -0.5, -0.5, 0.5], [0.25, 0.25, 0.25, -0.75]])
    std = math.sqrt(4 * 0.25 / 3)
    np.testing.assert_allclose(group_advantages(rewards, "group_std")[0], np.array([1, -1, -1, 1]) * 0.5 / (std + 1e-4))


def test_advantages_of_equal_rewards_are_zero_either_way():
    for scale in ("none", "group_std"):
        assert np.all(group_advantages(np.full((2, 4), 0.3), scale) == 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_an_error(bad):
    with pytest.raises(ValueError, match="1 rewards are NaN or infinite"):
        group_advantages(np.array([[1.0, bad]]), "none")


def test_a_group_of_one_is_an_error():
    with pytest.raises(ValueError, match="at least two rollouts"):
        group_advantages(np.ones((4, 1)), "none")


def test_groups_with_one_outcome_are_not_informative():
    correct = np.array([[True, True], [True, False], [False, False]])
    assert informative_groups(correct).tolist() == [False, True, False]


def test_clipped_loss_and_gradient_by_hand():
    # ratios 1, 1.5 (A > 0: clipped at 1.28), 1.5 (A < 0: not clipped), 0.5 (A < 0: clipped at 0.8), 0.5 (A > 0: not)
    ratios, advantage = [1.0, 1.5, 1.5, 0.5, 0.5], [1.0, 1.0, -1.0, -1.0, 1.0]
    outputs, batch = inputs([math.log(r) for r in ratios], advantage=advantage, behaviour_logp=[0.0] * 5)
    loss = clipped_policy_gradient(0.2, 0.28)(outputs, batch)
    np.testing.assert_allclose(loss.detach(), [-1.0, -1.28, 1.5, 0.8, -0.5], atol=1e-6)
    loss.sum().backward()
    np.testing.assert_allclose(outputs.logp_N.grad, [-1.0, 0.0, 1.5, 0.0, -0.5], atol=1e-6)
    assert clip_share(0.2, 0.28)(outputs, batch).tolist() == [0, 1, 0, 1, 0]


def test_on_policy_gradient_is_the_policy_gradient():
    logp = [-0.3, -1.2, -2.0]
    outputs, batch = inputs(logp, advantage=[0.5, 0.5, -1.0], behaviour_logp=logp)
    clipped_policy_gradient(0.2, 0.28)(outputs, batch).sum().backward()
    np.testing.assert_allclose(outputs.logp_N.grad, [-0.5, -0.5, 1.0], atol=1e-6)


def test_k3_by_hand_and_its_gradient_is_not_zero():
    outputs, batch = inputs([-1.0, -1.0], reference_logp=[-1.0, -2.0], behaviour_logp=[-1.0, 0.0])
    loss = kl_to_reference(outputs, batch)
    np.testing.assert_allclose(loss.detach(), [0.0, math.exp(-1.0) + 1.0 - 1.0], atol=1e-6)
    loss.sum().backward()
    np.testing.assert_allclose(outputs.logp_N.grad, [0.0, 1.0 - math.exp(-1.0)], atol=1e-6)
    np.testing.assert_allclose(behaviour_kl(outputs, batch).detach(), [0.0, math.exp(-1.0)], atol=1e-6)


def test_k3_is_unbiased_over_the_policys_own_samples():
    torch.manual_seed(0)
    policy, reference = torch.randn(6).log_softmax(0), torch.randn(6).log_softmax(0)
    exact = float((policy.exp() * (policy - reference)).sum())
    outputs, batch = inputs(policy.tolist(), reference_logp=reference.tolist())
    assert float((policy.exp() * kl_to_reference(outputs, batch)).sum().detach()) == pytest.approx(exact, abs=1e-6)
