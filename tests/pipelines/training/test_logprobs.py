from __future__ import annotations

import pytest
import torch

from pipelines.training import logprobs
from pipelines.training.logprobs import token_logprobs

N, V = 37, 19


def drawn(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits_N_V = (torch.randn(N, V, generator=generator) * 5).to(dtype).requires_grad_()
    targets_N = torch.randint(0, V, (N,), generator=generator)
    return logits_N_V, targets_N, torch.randn(N, generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows_of_a_block", [1, 5, 100])
def test_values_and_gradient_are_those_of_log_softmax(monkeypatch, temperature, rows_of_a_block):
    monkeypatch.setattr(logprobs, "_BLOCK", {"cpu": rows_of_a_block * V})
    logits_N_V, targets_N, weights_N = drawn()
    found_N = token_logprobs(logits_N_V, targets_N, temperature)
    (gradient_N_V,) = torch.autograd.grad((found_N * weights_N).sum(), logits_N_V)
    exact_N_V = logits_N_V.detach().double().requires_grad_()
    exact_N = torch.log_softmax(exact_N_V / temperature, -1)[torch.arange(N), targets_N]
    (exact_gradient_N_V,) = torch.autograd.grad((exact_N * weights_N).sum(), exact_N_V)
    torch.testing.assert_close(found_N.double(), exact_N, atol=5e-6, rtol=0)
    torch.testing.assert_close(gradient_N_V.double(), exact_gradient_N_V, atol=5e-6, rtol=0)


def test_the_split_into_blocks_changes_no_bit(monkeypatch):
    results = []
    for rows in (1, 8, N):
        monkeypatch.setattr(logprobs, "_BLOCK", {"cpu": rows * V})
        logits_N_V, targets_N, weights_N = drawn()
        found_N = token_logprobs(logits_N_V, targets_N)
        results.append((found_N, *torch.autograd.grad((found_N * weights_N).sum(), logits_N_V)))
    for found_N, gradient_N_V in results[1:]:
        assert found_N.equal(results[0][0]) and gradient_N_V.equal(results[0][1])


def test_bfloat16_logits_have_float32_values_and_a_bfloat16_gradient():
    logits_N_V, targets_N, weights_N = drawn(torch.bfloat16)
    found_N = token_logprobs(logits_N_V, targets_N)
    (gradient_N_V,) = torch.autograd.grad((found_N * weights_N).sum(), logits_N_V)
    expected_N = torch.log_softmax(logits_N_V.float(), -1)[torch.arange(N), targets_N]
    assert found_N.dtype == torch.float32 and gradient_N_V.dtype == torch.bfloat16
    torch.testing.assert_close(found_N, expected_N, atol=1e-5, rtol=0)


def test_what_is_no_distribution_stays_visible():
    logits_N_V, targets_N, _ = drawn()
    with torch.no_grad():
        logits_N_V[3, 4] = float("nan")
    assert token_logprobs(logits_N_V, targets_N).isnan().nonzero().flatten().tolist() == [3]
