"""The native engine against plain forward passes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipelines.errors import UserError
from pipelines.generation.draw import draw
from pipelines.generation.engine import Prompt, sample_key
from pipelines.generation.native import NativeEngine
from pipelines.generation.randomness import uniforms
from pipelines.generation.settings import NativeEngineParams, Sampling

ENDS_AT_1 = SimpleNamespace(eos_token_id=1, pad_token_id=0)


def prompts(count: int = 6, samples: int = 3) -> list[Prompt]:
    lengths = np.random.default_rng(0).integers(2, 12, count)
    return [
        Prompt(
            np.random.default_rng(index).integers(2, 32, length).tolist(),
            tuple(sample_key(0, "t", 0, str(index), sample) for sample in range(samples)),
        )
        for index, length in enumerate(lengths)
    ]


def test_logprobs_are_those_of_a_plain_forward_pass(tiny_model):
    model = tiny_model()
    drawn = NativeEngine(model, ENDS_AT_1).generate(prompts(), Sampling(temperature=0.7, max_new_tokens=12))
    expanded = [prompt.tokens for prompt in prompts() for _ in prompt.keys]
    for prompt, tokens, logprobs in zip(expanded, drawn.tokens, drawn.logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0].float() / 0.7
        expected = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-5)


def test_a_completion_ends_with_the_first_end_token_or_at_the_limit(tiny_model):
    drawn = NativeEngine(tiny_model(), ENDS_AT_1).generate(
        prompts(12), Sampling(temperature=1.0, max_new_tokens=9, stop_ids=[2, 3])
    )
    assert set(drawn.finish_reasons) == {"stop", "length"}
    for tokens, reason in zip(drawn.tokens, drawn.finish_reasons, strict=True):
        assert not set(tokens[:-1]) & {1, 2, 3}
        assert (tokens[-1] in {1, 2, 3}) == (reason == "stop")
        assert reason == "stop" or len(tokens) == 9


def test_samples_do_not_depend_on_order_or_on_the_rows_decoded_side_by_side(tiny_model):
    model, asked = tiny_model(), prompts(8)
    sampling = Sampling(temperature=1.0, max_new_tokens=10)
    together = NativeEngine(model, ENDS_AT_1).generate(asked, sampling)
    backwards = NativeEngine(model, ENDS_AT_1).generate(asked[::-1], sampling)
    few = NativeEngine(model, ENDS_AT_1, NativeEngineParams(name="native", cache_tokens=84)).generate(asked, sampling)
    by_prompt = [together.tokens[i : i + 3] for i in range(0, 24, 3)]
    assert [backwards.tokens[i : i + 3] for i in range(0, 24, 3)][::-1] == by_prompt
    assert few.tokens == together.tokens


def test_loaded_weights_are_the_ones_that_sample(tiny_model):
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    engine = NativeEngine(tiny_model(0), ENDS_AT_1)
    engine.load(tiny_model(1).state_dict(), version=7)
    drawn = engine.generate(prompts(), sampling)
    assert drawn.policy_version == 7
    assert drawn.logprobs == NativeEngine(tiny_model(1), ENDS_AT_1).generate(prompts(), sampling).logprobs


def test_weights_that_do_not_fit_are_refused(tiny_model):
    engine = NativeEngine(tiny_model(), ENDS_AT_1)
    weights = dict(tiny_model().state_dict())
    name = "model.norm.weight"
    with pytest.raises(ValueError, match="weight has shape"):
        engine.load(weights | {name: torch.zeros(3)}, 1)
    del weights[name]
    with pytest.raises(ValueError, match="differing names"):
        engine.load(weights, 1)


def test_a_completion_that_does_not_fit_the_model_is_refused(tiny_model):
    with pytest.raises(UserError, match="the model has 128 positions; lower max_new_tokens"):
        NativeEngine(tiny_model(), ENDS_AT_1).generate(prompts(), Sampling(temperature=1.0, max_new_tokens=127))


def test_draw_follows_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 20_000
    u = uniforms(np.arange(count, dtype=np.uint64), 0)
    tokens, logprobs = draw(probabilities.log().expand(count, 4), u)
    shares = np.bincount(tokens.numpy(), minlength=4) / count
    np.testing.assert_allclose(shares, probabilities.numpy(), atol=4 * (0.25 / count) ** 0.5)  # four standard errors
    np.testing.assert_allclose(logprobs.exp().numpy(), probabilities[tokens].numpy(), rtol=1e-5)


def test_draw_takes_the_token_whose_interval_holds_the_uniform():
    logp = torch.tensor([[0.25, 0.5, 0.25]]).log().expand(4, 3)
    tokens, _ = draw(logp, np.array([0.0, 0.2, 0.3, 0.8]))
    assert tokens.tolist() == [0, 0, 1, 2]


def test_randomness_is_splitmix64():
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # the published outputs for seed 0
    for position, value in enumerate(first):
        assert uniforms(np.zeros(1, np.uint64), position)[0] == (value >> 11) * 2.0**-53


def test_a_key_names_one_sample():
    keys = {
        sample_key(seed, stage, step, problem, sample)
        for seed in (0, 1)
        for stage in ("rl@1", "rl@2")
        for step in (1, 2)
        for problem in ("a", "b")
        for sample in (0, 1)
    }
    assert len(keys) == 32
