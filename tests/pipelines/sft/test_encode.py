"""What SFT learns from: the completion and its end, never the prompt, never a cut demonstration."""

from __future__ import annotations

import pytest

from pipelines.base.architectures import position_limit
from pipelines.base.checkpoint import initialise, qwen3_config
from pipelines.base.settings import Architecture
from pipelines.base.tokenizer import build_tokenizer, encode_prompts
from pipelines.errors import UserError
from pipelines.records import DEMONSTRATION, table
from pipelines.sft.train import encode_demonstrations, fine_tune
from pipelines.training.settings import TrainingParams


def demonstrations(*pairs: tuple[str, str]):
    keys = {"parents": [], "problem_id": "p", "family": "f", "level": 1, "mode": "steps"}
    rows = [keys | {"id": f"d{i}", "prompt": question, "completion": work} for i, (question, work) in enumerate(pairs)]
    return table(rows, DEMONSTRATION)


def test_weights_cover_the_completion_and_the_end_token_only():
    tokenizer = build_tokenizer(("two and ",), 64)
    (sequence,) = encode_demonstrations(tokenizer, demonstrations(("two and 3?", "<think></think>5")), 64)
    weights = sequence.values["supervised"]
    learned = sequence.tokens[weights == 1].tolist()
    assert tokenizer.decode(learned) == "<think></think>5<|end|>"
    assert tokenizer.decode(sequence.tokens[weights == 0].tolist()) == "<|user|>two and 3?<|assistant|>"


def test_a_demonstration_that_is_too_long_is_refused_by_name():
    tokenizer = build_tokenizer((), 64)
    with pytest.raises(UserError, match=r"demonstration d1 has \d+ tokens; sft.max_tokens allows 10"):
        encode_demonstrations(tokenizer, demonstrations(("1", "2"), ("1", "2" * 30)), 10)


def gpt2(tokenizer, positions):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, n_positions=positions))


def qwen3(tokenizer, positions):
    shape = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp": 32, "rope_theta": 1000.0}
    return initialise(qwen3_config(Architecture(**shape, max_length=positions), tokenizer), 0)


@pytest.mark.parametrize("model", [gpt2, qwen3])
def test_a_demonstration_needs_positions_in_the_model(model, tmp_path):
    tokenizer = build_tokenizer((), 64)
    sequences = encode_demonstrations(tokenizer, demonstrations(("1+1?", "2"), ("1+1?", "2" * 10)), 64)
    optimiser = {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0, "clip_norm": 1.0}
    params = TrainingParams(
        steps=1, batch_size=2, checkpoint_every=1, optimiser=optimiser, compute={"micro_tokens": 64}
    )
    options = {"pad_id": 0, "seed": 0, "report": lambda *_: None}
    said = r"longest demonstration has 17 tokens, .* 16 positions; raise base\.source\.architecture\.max_length to 17"
    with pytest.raises(UserError, match=said):
        fine_tune(model(tokenizer, 16), sequences, params, scratch=tmp_path / "too few", **options)
    enough = model(tokenizer, 17)
    assert position_limit(enough) == 17
    assert len(fine_tune(enough, sequences, params, scratch=tmp_path / "enough", **options)) == 1


def test_no_demonstrations_is_an_error():
    with pytest.raises(UserError, match="no demonstrations"):
        encode_demonstrations(build_tokenizer((), 64), demonstrations(), 10)


def test_without_a_chat_template_the_prompt_is_plain_text():
    tokenizer = build_tokenizer((), 64)
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_prompts(tokenizer, ["1+1"])[0]) == "1+1"
