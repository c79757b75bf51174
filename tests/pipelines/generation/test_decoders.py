"""The insides of the native engine: its two decoders over model families, its window of columns, its attention.

Legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pipelines.base.tokenizer import build_tokenizer
from pipelines.generation.attention import attention
from pipelines.generation.decoders import RereadingDecoder, WindowDecoder, decoder_for
from pipelines.generation.engine import Prompt, sample_key
from pipelines.generation.native import NativeEngine, Stops
from pipelines.generation.settings import NativeEngineParams, Sampling

ENDS_AT_1 = SimpleNamespace(eos_token_id=1, pad_token_id=0)
VOCABULARY = 40
SAMPLING = Sampling(temperature=0.9, max_new_tokens=16)
LENGTHS = (1, 2, 3, 5, 9, 14, 7, 30)
ONE_ROW = max(LENGTHS) + SAMPLING.max_new_tokens  # tokens of cache that one row takes


@dataclass(frozen=True)
class Family:
    """A model of `transformers`: what is special about its past, its class and its configuration."""

    past: str
    name: str
    sizes: dict[str, Any] = field(default_factory=dict)
    decoder: type = WindowDecoder

    def model(self, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        cls = getattr(transformers, f"{self.name}ForCausalLM" if self.name != "GPT2" else "GPT2LMHeadModel")
        common = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
        model = cls(cls.config_class(**(common | self.sizes))).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2 and parameter.std() < 0.1:  # the usual initialisation predicts next to nothing
                    parameter.normal_(0, 0.2)
        return model


USUAL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
GROUPED = USUAL | {"num_key_value_heads": 2}
HEADS_OF_8 = GROUPED | {"head_dim": 8}
SHORT = {"hidden_size": 32, "num_hidden_layers": 2}

FAMILIES = [
    Family("rotary positions, grouped heads", "Llama", GROUPED),
    Family("absolute positions", "GPT2", {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    Family(
        "absolute positions that begin at two",
        "OPT",
        SHORT | {"ffn_dim": 48, "num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 32},
    ),
    Family("rotary positions of a part of the head", "GPTNeoX", USUAL),
    Family(
        "no position but ALiBi, made from the mask",
        "Bloom",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4},
        RereadingDecoder,
    ),
    Family(
        "positions that it counts itself",
        "Bart",
        {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "is_decoder": True},
        RereadingDecoder,
    ),
    Family("ALiBi, one key head", "Falcon", SHORT | {"num_attention_heads": 4, "alibi": True}),
    Family("rotary positions, one key head", "Falcon", SHORT | {"num_attention_heads": 4, "alibi": False}),
    Family("a sliding window of 4 tokens", "Mistral", GROUPED | {"sliding_window": 4}),
    Family("sliding and full attention in turn", "Gemma2", HEADS_OF_8 | {"sliding_window": 4}),
    Family("attention to sinks", "GptOss", HEADS_OF_8 | {"sliding_window": 4, "num_local_experts": 4}),
    Family(
        "chunks of 8 tokens",
        "Llama4",
        HEADS_OF_8 | {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 8},
    ),
    Family("experts", "Mixtral", GROUPED | {"num_local_experts": 4}),
    Family("a recurrent state", "Mamba", SHORT | {"state_size": 4}, RereadingDecoder),
    Family(
        "a recurrent state beside a sliding window",
        "RecurrentGemma",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "attention_window_size": 4,
            "lru_width": 32,
        },
        RereadingDecoder,
    ),
    Family(
        "a convolution beside attention",
        "Lfm2",
        GROUPED | {"layer_types": ["conv", "full_attention"]},
        RereadingDecoder,
    ),
]


def named(family: Family) -> str:
    return f"{family.name}: {family.past}"


def prompts(lengths=LENGTHS, samples: int = 3) -> list[Prompt]:
    generator = np.random.default_rng(0)
    return [
        Prompt(
            generator.integers(2, VOCABULARY, length).tolist(),
            tuple(sample_key(0, "decoders", 0, str(index), sample) for sample in range(samples)),
        )
        for index, length in enumerate(lengths)
    ]


@torch.no_grad()
def plain_logprobs(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> np.ndarray:
    """Log-probs of `tokens` behind `prompt` by one forward pass without a past."""
    logits_T_V = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits_T_V / temperature, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def largest_gap(model: Any, drawn: Any, temperature: float = SAMPLING.temperature) -> float:
    expanded = [prompt.tokens for prompt in prompts() for _ in prompt.keys]
    rows = zip(expanded, drawn.tokens, drawn.logprobs, strict=True)
    return max(
        float(np.abs(plain_logprobs(model, prompt, tokens, temperature) - logprobs).max())
        for prompt, tokens, logprobs in rows
    )


@pytest.fixture
def moves(monkeypatch) -> list[int]:
    """Where the window moved back to, each time it did."""
    seen: list[int] = []
    original = WindowDecoder._move_back

    def counted(self, end: int) -> None:
        seen.append(end)
        original(self, end)

    monkeypatch.setattr(WindowDecoder, "_move_back", counted)
    return seen


@pytest.mark.parametrize("family", FAMILIES, ids=named)
def test_every_family_samples_as_a_plain_forward_pass_predicts_in_any_cache(family, moves):
    model = family.model()
    assert type(decoder_for(model, 4, 4, 4, 0)) is family.decoder
    drawn = []
    for rows in (24, 5, 1):
        params = NativeEngineParams(name="native", cache_tokens=rows * ONE_ROW)
        drawn.append(NativeEngine(model, ENDS_AT_1, params).generate(prompts(), SAMPLING))
        assert largest_gap(model, drawn[-1]) <= 1e-5
    assert drawn[0].tokens == drawn[1].tokens == drawn[2].tokens
    assert {"stop", "length"} == set(drawn[0].finish_reasons)
    assert (len(moves) > 0) == (family.decoder is WindowDecoder)


def llama(**more: Any) -> Any:
    return Family("", "Llama", GROUPED | more).model()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[1], FAMILIES[7], FAMILIES[12]], ids=named)
def test_rows_that_join_and_leave_at_any_time_keep_their_own_past(family, seed, moves):
    """A random schedule of prompts read, tokens appended and rows dropped; every logit against a plain pass."""
    model, generator = family.model(), np.random.default_rng(seed)
    room, longest, limit = 5, 9, 6
    decoder = decoder_for(model, room, longest, limit, 0)
    texts: list[list[int]] = []
    drawn: list[int] = []
    for _ in range(60):
        if len(texts) < room and (not texts or generator.random() < 0.4):
            read = [generator.integers(2, VOCABULARY, generator.integers(1, longest + 1)).tolist() for _ in range(2)]
            expect_logits(model, read, decoder.prefill(read))
            prompt_of_row = generator.integers(0, 2, generator.integers(1, room - len(texts) + 1))
            decoder.admit(prompt_of_row)
            texts += [list(read[index]) for index in prompt_of_row]
            drawn += [0] * len(prompt_of_row)
        tokens = generator.integers(2, VOCABULARY, len(texts))
        texts = [[*text, int(token)] for text, token in zip(texts, tokens, strict=True)]
        drawn = [count + 1 for count in drawn]
        expect_logits(model, texts, decoder.step(torch.from_numpy(tokens)))
        alive = (np.array(drawn) < limit) & (generator.random(len(texts)) < 0.9)
        order = decoder.keep(alive)
        assert sorted(order) == np.flatnonzero(alive).tolist()
        texts, drawn = [texts[index] for index in order], [drawn[index] for index in order]
    assert moves or family.decoder is RereadingDecoder


@torch.no_grad()
def expect_logits(model: Any, texts: list[list[int]], logits_B_V: Tensor) -> None:
    expected = torch.stack([model(torch.tensor([text]), use_cache=False).logits[0, -1] for text in texts])
    torch.testing.assert_close(logits_B_V, expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_samples_near_a_plain_bfloat16_pass_and_leaves_the_model_as_it_was():
    """Rounding to 8 bits in another order moves a log-prob by a few hundredths of a nat, here at most 0.15."""
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = NativeEngine(model, ENDS_AT_1, NativeEngineParams(name="native", dtype="bfloat16"))
    drawn = engine.generate(prompts(), SAMPLING)
    rounded = llama().bfloat16()
    assert largest_gap(rounded, drawn) <= 0.15
    assert largest_gap(model, drawn) > 1e-3  # it did sample in bfloat16
    assert {str(tensor.dtype) for tensor in model.state_dict().values()} == {"torch.float32"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    engine.load(Family("", "Llama", GROUPED).model(seed=1).state_dict(), 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_float32_engine_follows_the_model_it_was_given():
    model = llama()
    engine = NativeEngine(model, ENDS_AT_1)
    before = engine.generate(prompts(), SAMPLING)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    after = engine.generate(prompts(), SAMPLING)
    assert after.logprobs != before.logprobs
    assert largest_gap(model, after) <= 1e-5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(temperature=1.0, max_new_tokens=4, top_k=5, top_p=0.9)])
def test_logits_that_are_not_numbers_raise_and_leave_the_model_usable(bad, sampling):
    model = llama()
    good = model.lm_head.weight[5].clone()
    engine = NativeEngine(model.train(), ENDS_AT_1)
    with torch.no_grad():
        model.lm_head.weight[5] = bad
    with pytest.raises(FloatingPointError, match="the model predicts NaN or infinity: its weights are damaged"):
        engine.generate(prompts(), sampling)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        model.lm_head.weight[5] = good
    assert largest_gap(model.eval(), engine.generate(prompts(), SAMPLING)) <= 1e-5


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_attention_of_one_query_is_that_of_sdpa(mask, key_heads):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 1, 8), torch.randn(3, key_heads, 6, 8), torch.randn(3, key_heads, 6, 8)
    allowed = torch.rand(3, 1, 1, 6) < 0.6
    allowed[..., -1] = True
    masks = {"none": None, "bool": allowed, "float": torch.zeros(3, 1, 1, 6).masked_fill(~allowed, -torch.inf)}
    module = SimpleNamespace(num_key_value_groups=4 // key_heads, is_causal=True, training=False)
    for scaling in (None, 0.2):
        found, _ = attention(module, query, key, value, masks[mask], scaling=scaling)
        expected, _ = sdpa_attention_forward(module, query, key, value, masks[mask], scaling=scaling)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


TOKENIZER = build_tokenizer(("apple",), 64)


def bytes_of(*values: int) -> list[int]:
    return TOKENIZER.convert_tokens_to_ids([f"<0x{value:02X}>" for value in values])


def first_end(tokens: list[int], *texts: str, ids: tuple[int, ...] = ()) -> int | None:
    sampling = Sampling(temperature=1.0, max_new_tokens=1, stop=list(texts))
    return Stops(ids, sampling, TOKENIZER).first_end(tokens)


def test_a_stop_text_ends_behind_the_token_that_completes_it():
    """In the default tokenizer é is two bytes, a token each, and apple is a token of its own."""
    tokens = TOKENIZER("café apple!", add_special_tokens=False)["input_ids"]
    assert len(tokens) == 8  # c a f é é ␣ apple !
    assert first_end(tokens, "é") == 5
    assert first_end(tokens, "fé a") == 7  # inside of a token
    assert first_end(tokens, "pp", "é ") == 6
    assert first_end(tokens, "e!") == 8
    assert first_end(tokens, "z") is None
    assert first_end(tokens, "é", ids=(tokens[2],)) == 3


def test_a_stop_text_behind_other_characters_of_several_bytes_is_seen():
    """The newest tokens alone begin inside a character, and bytes that are cut there are decoded to nothing."""
    for before in ("日本", "日本語", "日本語日"):
        tokens = TOKENIZER(f"{before}é", add_special_tokens=False)["input_ids"]
        assert first_end(tokens, "é") == len(tokens) == 3 * len(before) + 2


def test_bytes_that_are_no_character_where_they_stand_hold_no_stop_text():
    """B as a byte behind F6, which begins no character, is broken text; alone it would be B."""
    tokens = bytes_of(0xF6, ord("B")) + TOKENIZER("wxyz", add_special_tokens=False)["input_ids"]
    assert "B" not in TOKENIZER.decode(tokens)
    assert first_end(tokens, "B") is None
    assert first_end(tokens[1:], "B") == 1


def test_a_character_that_the_next_byte_breaks_has_ended_its_completion():
    assert first_end(bytes_of(0xC3, 0xA9, 0xFF), "é") == 2


@pytest.mark.parametrize("seed", range(3))
def test_decoding_ends_where_the_text_so_far_first_holds_a_stop_text(seed):
    """Against decoding every beginning of tokens of which three quarters are single bytes."""
    generator = np.random.default_rng(seed)
    for _ in range(200):
        tokens = generator.integers(2, len(TOKENIZER), 12).tolist()
        tokens[3:5] = bytes_of(0xC3, 0xA9)
        texts = ["é", "B", "x.", "a"]
        beginnings = (n for n in range(1, 13) if any(text in TOKENIZER.decode(tokens[:n]) for text in texts))
        assert first_end(tokens, *texts) == next(beginnings, None)
