"""What every engine promises, tested on each: the native one, vLLM in process, and a vLLM server.

Legend: S samples, T tokens of a completion, V vocabulary.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from pipelines.errors import UserError
from pipelines.generation.engine import Completions, Prompt, sample_key
from pipelines.generation.settings import Sampling

TOLERANCE = 1e-5
"""Largest difference of a log-prob from a plain float32 forward pass, in nats."""
LENGTHS = (1, 3, 3, 17, 64, 190)


def prompts(lengths=LENGTHS, samples: int = 3) -> list[Prompt]:
    """Prompts of these lengths and their keys."""
    generator = np.random.default_rng(len(lengths))
    return [
        Prompt(
            generator.integers(8, 361, length).tolist(),
            tuple(sample_key(0, "conformance", 0, str(index), sample) for sample in range(samples)),
        )
        for index, length in enumerate(lengths)
    ]


def expanded(asked: list[Prompt]) -> list[list[int]]:
    """The prompt of every sample."""
    return [prompt.tokens for prompt in asked for _ in prompt.keys]


@torch.no_grad()
def plain_logp(model, prompt: list[int], tokens: list[int], sampling: Sampling) -> np.ndarray:
    """logp_T_V of a plain forward pass: temperature, then top-k, then top-p, renormalised; written for clearness."""
    logits_T_V = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    p_T_V = torch.softmax(logits_T_V.double() / sampling.temperature, -1).numpy()
    for p_V in p_T_V:
        order = np.argsort(-p_V)
        if sampling.top_k:
            p_V[order[sampling.top_k :]] = 0.0
            p_V /= p_V.sum()
        if sampling.top_p < 1:
            mass = np.cumsum(p_V[order])
            p_V[order[1 + np.searchsorted(mass, sampling.top_p) :]] = 0.0
            p_V /= p_V.sum()
    with np.errstate(divide="ignore"):
        return np.log(p_T_V)


def assert_logprobs_are_those_of(model, engine, asked: list[Prompt], drawn: Completions, sampling: Sampling) -> None:
    largest = 0.0
    for prompt, tokens, logprobs in zip(expanded(asked), drawn.tokens, drawn.logprobs, strict=True):
        expected = plain_logp(model, prompt, tokens, sampling)[np.arange(len(tokens)), tokens]
        assert len(logprobs) == len(tokens)
        largest = max(largest, np.abs(np.array(logprobs) - expected).max())
    assert largest <= TOLERANCE


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_a_plain_forward_pass_for_ragged_prompts(engine, world, temperature):
    sampling = Sampling(temperature=temperature, max_new_tokens=40)
    drawn = engine.generate(prompts(), sampling)
    assert_logprobs_are_those_of(world.model, engine, prompts(), drawn, sampling)


def test_a_key_names_a_sample(engine):
    sampling = Sampling(temperature=1.0, max_new_tokens=20)
    tokens = prompts()[3].tokens
    one, again, other = engine.generate([Prompt(tokens, (5, 5, 6))], sampling).tokens
    assert one == again != other
    assert engine.generate([Prompt(tokens, (2**64 - 1, 6))], sampling).tokens[1] == other


def test_samples_do_not_depend_on_order_or_company(engine):
    sampling = Sampling(temperature=1.0, max_new_tokens=24)
    asked = prompts()
    together = engine.generate(asked, sampling)
    backwards = engine.generate(asked[::-1], sampling)
    by_prompt = [together.tokens[i : i + 3] for i in range(0, len(together.tokens), 3)]
    assert [backwards.tokens[i : i + 3] for i in range(0, len(backwards.tokens), 3)][::-1] == by_prompt
    for prompt, expected in zip(asked, by_prompt, strict=True):
        alone = [engine.generate([Prompt(prompt.tokens, (key,))], sampling).tokens[0] for key in prompt.keys]
        assert alone == expected


def test_nothing_asked_is_nothing_answered(engine):
    sampling = Sampling(temperature=1.0, max_new_tokens=2)
    assert engine.generate([], sampling).tokens == []
    drawn = engine.generate([Prompt([5], ()), Prompt([6], (1,))], sampling)
    assert len(drawn.tokens) == len(drawn.logprobs) == len(drawn.finish_reasons) == 1


def assert_ends(drawn: Completions, ends: set[int], limit: int) -> None:
    assert set(drawn.finish_reasons) == {"stop", "length"}
    for tokens, reason in zip(drawn.tokens, drawn.finish_reasons, strict=True):
        assert not set(tokens[:-1]) & ends
        assert (tokens[-1] in ends) == (reason == "stop")
        assert reason == "stop" or len(tokens) == limit


def test_end_tokens_of_tokenizer_and_generation_config_end_a_completion_and_stay(engine, world):
    ends = set(world.model.generation_config.eos_token_id)
    assert len(ends) == 2
    drawn = engine.generate(prompts((5,) * 8, 8), Sampling(temperature=1.0, max_new_tokens=60))
    assert_ends(drawn, ends, 60)
    assert {tokens[-1] for tokens in drawn.tokens} >= ends


def test_stop_ids_end_a_completion_and_stay(engine, world):
    stop_ids = set(range(20, 60))
    sampling = Sampling(temperature=1.0, max_new_tokens=8, stop_ids=[*stop_ids, 10**6])
    drawn = engine.generate(prompts((5,) * 8, 4), sampling)
    assert_ends(drawn, stop_ids | set(world.model.generation_config.eos_token_id), 8)


def test_a_stop_text_ends_a_completion_where_it_completes_however_its_tokens_cut_it(engine, world):
    sampling = Sampling(temperature=1.0, max_new_tokens=32)
    asked = prompts((5,) * 8, 4)
    free = engine.generate(asked, sampling)
    decode = world.tokenizer.decode
    spread = pair_of_characters(decode, free.tokens)
    stops = [spread, "apple", "é"]
    drawn = engine.generate(asked, sampling.model_copy(update={"stop": stops}))
    ended_by_text = 0
    for index, tokens in enumerate(free.tokens):
        ends = (n for n in range(1, len(tokens) + 1) if any(stop in decode(tokens[:n]) for stop in stops))
        count = next(ends, None)
        ended_by_text += count is not None
        assert drawn.tokens[index] == tokens[:count]
        assert drawn.finish_reasons[index] == ("stop" if count else free.finish_reasons[index])
        np.testing.assert_allclose(drawn.logprobs[index], free.logprobs[index][:count], atol=TOLERANCE)
    assert ended_by_text >= 2


def pair_of_characters(decode, tokens_S: list[list[int]]) -> str:
    """Two printable characters that a sample wrote as one token each, one behind the other, in its middle."""
    for tokens in tokens_S:
        for pair in pairwise(tokens[4:]):
            text = decode(pair)
            if len(text) == 2 and text.isascii() and text.isprintable():
                return text
    raise AssertionError("no sample holds such a pair; take more samples")


def test_a_stop_text_in_the_last_token_that_may_be_drawn_still_counts_as_a_stop(engine, world):
    sampling = Sampling(temperature=1.0, max_new_tokens=6)
    asked = prompts((5,) * 8, 4)
    free = engine.generate(asked, sampling)
    last = next(
        text
        for tokens in free.tokens
        if len(tokens) == 6
        and (text := world.tokenizer.decode(tokens[-1:])).isalpha()
        and text not in world.tokenizer.decode(tokens[:-1])
    )
    drawn = engine.generate(asked, sampling.model_copy(update={"stop": [last]}))
    assert ("stop", 6) in {
        (reason, len(tokens)) for reason, tokens in zip(drawn.finish_reasons, drawn.tokens, strict=True)
    }


def test_loaded_weights_are_the_ones_that_sample(engine, world):
    sampling = Sampling(temperature=1.0, max_new_tokens=20)
    asked = prompts()
    before = engine.generate(asked, sampling)
    other = world.make(1)
    engine.load(other.state_dict(), version=7)
    drawn = engine.generate(asked, sampling)
    assert (before.policy_version, drawn.policy_version) == (0, 7)
    assert drawn.tokens != before.tokens
    assert_logprobs_are_those_of(other, engine, asked, drawn, sampling)
    engine.load(world.model.state_dict(), version=8)
    again = engine.generate(asked, sampling)
    assert again.tokens == before.tokens
    assert again.policy_version == 8


def test_an_update_as_small_as_a_training_step_arrives(engine, world):
    sampling = Sampling(temperature=1.0, max_new_tokens=20)
    stepped = world.make(0)
    with torch.no_grad():
        for index, parameter in enumerate(stepped.parameters()):
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    engine.load(stepped.state_dict(), version=1)
    assert_logprobs_are_those_of(stepped, engine, prompts(), engine.generate(prompts(), sampling), sampling)


def test_the_head_of_a_tied_model_may_be_left_out_but_not_differ(engine, world):
    other = world.make(1)
    weights = dict(other.state_dict())
    head = weights.pop("lm_head.weight")
    engine.load(weights, version=1)
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    assert_logprobs_are_those_of(other, engine, prompts(), engine.generate(prompts(), sampling), sampling)
    with pytest.raises(ValueError, match=r"lm_head.weight and model.embed_tokens.weight are one tensor"):
        engine.load(weights | {"lm_head.weight": head + 1}, version=2)


def test_weights_that_do_not_fit_are_refused_and_change_nothing(engine, world):
    sampling = Sampling(temperature=1.0, max_new_tokens=8)
    before = engine.generate(prompts(), sampling)
    weights = dict(world.make(1).state_dict())
    name = "model.norm.weight"
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\), the engine's model wants \(64,\)"):
        engine.load(weights | {name: torch.zeros(3)}, 1)
    with pytest.raises(ValueError, match=r"differing names \['extra'\]"):
        engine.load(weights | {"extra": torch.zeros(3)}, 1)
    del weights[name]
    with pytest.raises(ValueError, match=r"differing names \['model.norm.weight'\]"):
        engine.load(weights, 1)
    assert engine.generate(prompts(), sampling) == before


def test_a_sync_that_does_nothing_is_noticed(engine, world, monkeypatch):
    if engine.kind == "native":
        pytest.skip("the native engine copies weights in place; there is no other process or format between")
    monkeypatch.setattr(type(engine), "_put", lambda self, weights: None)
    with pytest.raises(RuntimeError, match="does not sample from the weights it was given"):
        engine.load(world.make(1).state_dict(), version=1)
    nearly = world.make(0)
    with torch.no_grad():
        nearly.model.norm.weight.mul_(1.0001)
    with pytest.raises(RuntimeError, match="still samples from older weights"):
        engine.load(nearly.state_dict(), version=1)
    assert engine.version == 0


def test_weights_that_predict_nan_raise_and_do_not_sample(engine, world):
    weights = {name: tensor.clone() for name, tensor in world.make(0).state_dict().items()}
    weights["model.norm.weight"][0] = torch.nan
    try:
        with pytest.raises(FloatingPointError, match="the model predicts NaN or infinity: its weights are damaged"):
            engine.load(weights, version=1)
            engine.generate(prompts(), Sampling(temperature=1.0, max_new_tokens=2))
    finally:
        engine.load(world.model.state_dict(), version=0)


def test_sampling_has_full_support(engine, world):
    """Frequencies of a first token, against its probabilities: within four standard errors, the rare ones summed."""
    count, prompt = 3000, prompts()[3].tokens
    sampling = Sampling(temperature=1.0, max_new_tokens=1)
    drawn = engine.generate([Prompt(prompt, tuple(sample_key(0, "f", 0, "p", i) for i in range(count)))], sampling)
    times_V = np.bincount([tokens[0] for tokens in drawn.tokens], minlength=world.vocabulary)
    p_V = np.exp(plain_logp(world.model, prompt, [0], sampling)[0])
    is_rare_V = p_V * count < 10
    assert is_rare_V.sum() > 100
    times = np.append(times_V[~is_rare_V], times_V[is_rare_V].sum())
    p = np.append(p_V[~is_rare_V], p_V[is_rare_V].sum())
    errors = np.abs(times / count - p) / np.sqrt(p * (1 - p) / count)
    assert errors.max() < 4
    expected_kinds = (1 - (1 - p_V[is_rare_V]) ** count).sum()  # rare tokens that should turn up at least once
    assert (times_V[is_rare_V] > 0).sum() == pytest.approx(expected_kinds, abs=4 * expected_kinds**0.5)


@pytest.mark.parametrize(
    "part", [{"top_k": 1}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.8}, {"top_k": 1000}, {"top_p": 1e-6}]
)
def test_top_k_and_top_p_restrict_the_support_and_renormalise(engine, world, part):
    sampling = Sampling(temperature=1.3, max_new_tokens=12, **part)
    asked = prompts(samples=6)
    drawn = engine.generate(asked, sampling)
    assert_logprobs_are_those_of(world.model, engine, asked, drawn, sampling)  # minus infinity outside the support


@pytest.mark.parametrize("part", [{}, {"top_k": 5}])
def test_measures_are_those_of_the_distribution_drawn_from(engine, world, part):
    sampling = Sampling(temperature=0.7, max_new_tokens=10, **part)
    asked = prompts()
    drawn = engine.generate(asked, sampling, measures=("entropy", "self_certainty"))
    assert drawn.tokens == engine.generate(asked, sampling).tokens
    for index, (prompt, tokens) in enumerate(zip(expanded(asked), drawn.tokens, strict=True)):
        logp_T_V = plain_logp(world.model, prompt, tokens, sampling)
        p_T_V = np.exp(logp_T_V)
        entropy_T = -np.where(p_T_V > 0, p_T_V * np.maximum(logp_T_V, -1e9), 0.0).sum(1)
        np.testing.assert_allclose(drawn.measures["entropy"][index], entropy_T, atol=1e-4)
        certainty_T = -np.log(world.vocabulary) - logp_T_V.mean(1)
        np.testing.assert_allclose(drawn.measures["self_certainty"][index], certainty_T, atol=1e-4)


def test_requests_that_no_engine_can_answer_are_refused(engine, world):
    positions = world.model.config.max_position_embeddings
    fits = Sampling(temperature=1.0, max_new_tokens=6)
    with pytest.raises(UserError, match=rf"make {positions + 1} tokens, the model has {positions} positions; lower"):
        engine.generate([Prompt([9] * (positions - 5), (1,))], fits)
    assert len(engine.generate([Prompt([9] * (positions - 6), (1,))], fits).tokens[0]) <= 6
    with pytest.raises(ValueError, match="a prompt without tokens"):
        engine.generate([Prompt([], (1,))], fits)
    with pytest.raises(ValueError, match="there is no measure 'mood'; there are entropy, self_certainty"):
        engine.generate([Prompt([5], (1,))], fits, measures=("mood",))


@pytest.mark.parametrize("temperature", [0.001, 3.0])
def test_temperatures_that_vllm_would_change_or_refuse_are_refused(engine, temperature):
    if engine.kind == "native":
        pytest.skip("the native engine takes every temperature")
    with pytest.raises(UserError, match=r"vLLM takes 0.01 to 2"):
        engine.generate([Prompt([5], (1,))], Sampling(temperature=temperature, max_new_tokens=2))
