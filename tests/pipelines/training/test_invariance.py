"""One optimiser step against a plain implementation in float64, however its units are laid out, cut and ordered.

The plain implementation reads one sequence at a time, without padding, and follows the papers' sums literally.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipelines.distill.train import kl_from_teacher
from pipelines.generation.engine import Prompt
from pipelines.generation.native import NativeEngine
from pipelines.generation.settings import Sampling
from pipelines.rl.losses import clipped_policy_gradient, kl_to_reference
from pipelines.training.batch import Sequence, micro_batches
from pipelines.training.components import BradleyTerry, TokenComponent, cross_entropy, score_outputs, token_outputs
from pipelines.training.settings import Compute, Optimiser, Training
from pipelines.training.trainer import Trainer

OPTIMISER = Optimiser(lr=1e-9, schedule="constant", warmup_steps=0, weight_decay=0.0, clip_norm=1e9)
GROUPS, SIZE = 4, 2
ONE_BY_EIGHT, TWO_BY_FOUR, EIGHT_BY_ONE = 16, 64, 4096  # micro_tokens
CPU = torch.device("cpu")


def groups(seed: int = 0):
    """Units of two sequences that begin with the same prompt; one continues the other's first token."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(GROUPS):
        prompt = rng.integers(2, 32, rng.integers(2, 7))
        unit = []
        for number in range(SIZE):
            rest = rng.integers(2, 32, rng.integers(1, 8))
            rest[0] = 9 if number else rest[0]
            action = np.concatenate([np.zeros(len(prompt)), np.ones(len(rest))]).astype(np.float32)
            values = {
                "weight": action * rng.random(len(action)).astype(np.float32),
                "action": action,
                "advantage": action * np.float32(rng.normal()),
                "behaviour_logp": action * (rng.normal(size=len(action)) * 0.3 - 3.4).astype(np.float32),
                "reference_logp": action * (rng.normal(size=len(action)) * 0.3 - 3.4).astype(np.float32),
            }
            unit.append(Sequence(np.concatenate([prompt, rest]), values))
        made.append(tuple(unit))
    return made


def components(teacher):
    return [
        TokenComponent("cross_entropy", 0.7, "weight", cross_entropy),
        TokenComponent("policy", 1.0, "action", clipped_policy_gradient(0.2, 0.28)),
        TokenComponent("kl", 0.3, "action", kl_to_reference),
        TokenComponent("teacher", 0.5, "weight", kl_from_teacher(teacher)),
    ]


def reference_gradients(model, teacher, units):
    """Loss and gradient of the step, sequence by sequence in float64."""
    model, teacher = model.double(), teacher.double()
    sums = dict.fromkeys(["cross_entropy", "policy", "kl", "teacher"], 0.0)
    weight_sum = action_sum = 0.0
    for sequence in [sequence for unit in units for sequence in unit]:
        tokens = torch.from_numpy(sequence.tokens)
        values = {name: torch.from_numpy(array).double() for name, array in sequence.values.items()}
        logits = [m(tokens[None]).logits[0].double() for m in (model, teacher)]
        student_T_V, teacher_T_V = (torch.log_softmax(each, -1) for each in logits)
        for t in range(1, len(tokens)):
            logp = student_T_V[t - 1, tokens[t]]
            weight, action, advantage = (values[name][t] for name in ("weight", "action", "advantage"))
            ratio = torch.exp(logp - values["behaviour_logp"][t])
            difference = values["reference_logp"][t] - logp
            p, log_p = teacher_T_V[t - 1].exp().detach(), teacher_T_V[t - 1].detach()
            sums["cross_entropy"] = sums["cross_entropy"] - weight * logp
            sums["policy"] = sums["policy"] - action * torch.minimum(
                ratio * advantage, ratio.clamp(0.8, 1.28) * advantage
            )
            sums["kl"] = sums["kl"] + action * (difference.exp() - difference - 1)
            sums["teacher"] = sums["teacher"] + weight * (p * (log_p - student_T_V[t - 1])).sum()
        weight_sum += float(values["weight"][1:].sum())
        action_sum += float(values["action"][1:].sum())
    loss = (
        0.7 * sums["cross_entropy"] / weight_sum
        + sums["policy"] / action_sum
        + 0.3 * sums["kl"] / action_sum
        + 0.5 * sums["teacher"] / weight_sum
    )
    loss.backward()
    parts = {
        "loss/cross_entropy": sums["cross_entropy"] / weight_sum,
        "loss/policy": sums["policy"] / action_sum,
        "loss/kl": sums["kl"] / action_sum,
        "loss/teacher": sums["teacher"] / weight_sum,
    }
    return {name: float(part.detach()) for name, part in parts.items()}, flat(model)


def flat(model) -> torch.Tensor:
    return torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])


def step(model, units, chosen, forward, **compute):
    params = Training(optimiser=OPTIMISER, compute=Compute(**compute), checkpoint_every=1)
    return Trainer(model, chosen, params, 1, 0, forward).update(units), flat(model)


def families():
    """Tiny models of three ways to place tokens: rotary with grouped heads, rotary with full heads, learned."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 32, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    llama = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        **shape,
    )
    gpt2 = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3, resid_pdrop=0.0, **shape)
    gpt2.attn_pdrop = gpt2.embd_pdrop = 0.0
    return {"llama": (LlamaForCausalLM, llama), "gpt2": (GPT2LMHeadModel, gpt2)}


def build(family, tiny_model, seed):
    if family == "qwen3":
        return tiny_model(seed)
    cls, config = families()[family]
    torch.manual_seed(seed)
    return cls(config)


CUTS = [ONE_BY_EIGHT, TWO_BY_FOUR, EIGHT_BY_ONE]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_every_layout_and_cut_has_the_gradient_of_the_plain_sums(family, layout, tiny_model):
    def fresh(seed):
        return build(family, tiny_model, seed)

    expected, gradient = reference_gradients(fresh(0), fresh(1), groups())
    for micro_tokens in CUTS:
        chosen = components(fresh(1))
        found, found_gradient = step(
            fresh(0), groups(), chosen, token_outputs, layout=layout, micro_tokens=micro_tokens
        )
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=2e-5, abs=2e-6), (name, micro_tokens)
        torch.testing.assert_close(found_gradient, gradient, rtol=2e-3, atol=3e-6)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_the_order_of_units_does_not_matter(layout, tiny_model):
    options = {"layout": layout, "micro_tokens": TWO_BY_FOUR}
    _, straight = step(tiny_model(), groups(), components(tiny_model(1)), token_outputs, **options)
    _, turned = step(tiny_model(), groups()[::-1], components(tiny_model(1)), token_outputs, **options)
    torch.testing.assert_close(turned, straight, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_bradley_terry_in_every_layout(layout, tiny_model):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForSequenceClassification

    def scorer():
        config = tiny_model().config
        config.num_labels = 1
        torch.manual_seed(3)
        return Qwen3ForSequenceClassification(config)

    plain, loss = scorer().double(), 0.0
    for chosen, rejected in groups():
        scores = [
            plain.score(plain.model(torch.from_numpy(s.tokens)[None]).last_hidden_state[0, -1])[0]
            for s in (chosen, rejected)
        ]
        loss = loss - torch.nn.functional.logsigmoid(scores[0] - scores[1]) / GROUPS
    loss.backward()
    for micro_tokens in CUTS:
        model = scorer()
        found, gradient = step(
            model, groups(), [BradleyTerry()], score_outputs, layout=layout, micro_tokens=micro_tokens
        )
        assert found["loss/bradley_terry"] == pytest.approx(float(loss.detach()), rel=1e-5)
        torch.testing.assert_close(gradient, flat(plain), rtol=2e-3, atol=3e-6)


def test_padding_on_the_left_gives_the_same_log_probs(tiny_model):
    model, pool = tiny_model(), groups()
    (batch,) = micro_batches(pool, "padded", EIGHT_BY_ONE, 0, CPU)
    logp_N = token_outputs(model, batch).logp_N.detach()
    ordered = [sequence for index in batch.units for sequence in pool[index]]
    for amount in (1, 7):
        found = []
        for sequence in ordered:
            tokens = torch.tensor([[0] * amount + sequence.tokens.tolist()])
            mask = torch.tensor([[0] * amount + [1] * len(sequence.tokens)])
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = model(tokens, attention_mask=mask, position_ids=positions).logits[0, amount:].detach()
            at = torch.from_numpy(sequence.scored())
            found.append(torch.log_softmax(logits, -1)[at - 1, torch.from_numpy(sequence.tokens)[at]])
        torch.testing.assert_close(torch.cat(found), logp_N, rtol=0, atol=1e-5)


def test_log_probs_at_a_temperature_are_those_of_the_sampler(tiny_model):
    model, pool = tiny_model(), groups()
    prompts = [
        Prompt(unit[0].tokens[: int(unit[0].scored()[0])].tolist(), (number,)) for number, unit in enumerate(pool)
    ]
    ends = SimpleNamespace(eos_token_id=1, pad_token_id=0)
    drawn = NativeEngine(model, ends).generate(prompts, Sampling(temperature=0.7, max_new_tokens=6))
    units = [
        (Sequence(np.array(p.tokens + t), {"action": np.array([0.0] * len(p.tokens) + [1.0] * len(t), np.float32)}),)
        for p, t in zip(prompts, drawn.tokens, strict=True)
    ]
    for batch in micro_batches(units, "padded", EIGHT_BY_ONE, 0, CPU):
        logp_N = token_outputs(model, batch, temperature=0.7).logp_N.detach()
        expected = np.concatenate([drawn.logprobs[index] for index in batch.units])
        np.testing.assert_allclose(logp_N, expected, atol=1e-5)


def test_a_shared_beginning_is_computed_once():
    prompt, rests = np.arange(2, 12), [[20, 21], [20, 22, 23], [24]]
    weight = np.concatenate([np.zeros(10), np.ones(3)]).astype(np.float32)
    unit = tuple(Sequence(np.array([*prompt, *rest]), {"weight": weight[: 10 + len(rest)]}) for rest in rests)
    (batch,) = micro_batches([unit], "shared", 64, 0, CPU)
    assert batch.tokens_B_T.shape == (1, 10 + 2 + 3 + 1)
    assert batch.positions_B_T[0].tolist() == [*range(10), 10, 11, 10, 11, 12, 10]
    assert batch.columns_N.tolist() == [9, 10, 9, 12, 13, 9]
    assert batch.targets_N.tolist() == [20, 21, 20, 22, 23, 24]
    assert batch.sequences_N.tolist() == [0, 0, 1, 1, 1, 2]
    assert [end.tolist() for end in batch.ends_S] == [[0, 0, 0], [11, 14, 15]]
    mask = batch.mask_B_1_T_T[0, 0]
    assert mask[11].nonzero().flatten().tolist() == [*range(12)]
    assert mask[13].nonzero().flatten().tolist() == [*range(10), 12, 13]
    assert mask[15].nonzero().flatten().tolist() == [*range(10), 15]


def test_packing_fills_rows_as_long_as_the_longest():
    lengths = [9, 5, 4, 3, 3, 2, 1]
    units = [(Sequence(np.full(n, n), {"weight": np.ones(n, np.float32)}),) for n in lengths]
    batches = list(micro_batches(units, "packed", 18, 0, CPU))
    rows = [row for batch in batches for row in batch.tokens_B_T.tolist()]
    assert sorted(sorted(set(row) - {0}) for row in rows) == [[1, 2, 3], [4, 5], [9]]
    assert sorted(index for batch in batches for index in batch.units) == list(range(7))
    assert all(batch.tokens_B_T.numel() <= 18 for batch in batches)
