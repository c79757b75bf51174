"""Checkpoints of other architectures, as they come: without padding token or template, damaged, or incomplete."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.base.architectures import load_model, load_tokenizer, reward_model_from
from pipelines.base.checkpoint import import_checkpoint, materialise
from pipelines.base.settings import BaseParams
from pipelines.base.tokenizer import build_tokenizer, encode_prompts
from pipelines.errors import UserError
from pipelines.generation.engine import Prompt
from pipelines.generation.native import NativeEngine
from pipelines.generation.settings import Sampling
from pipelines.rewards.model import RewardModel


@pytest.fixture
def gpt2(tmp_path):
    """A GPT-2 whose tokenizer has neither padding token nor chat template, and more embeddings than tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    directory = tmp_path / "a model"
    tokenizer = build_tokenizer((), 64)
    tokenizer.chat_template, tokenizer.pad_token = None, None
    tokenizer.save_pretrained(directory)
    size = len(tokenizer)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=size + 8, n_embd=16, n_layer=1, n_head=2, n_positions=64, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


def made(directory, output):
    """Import `directory`, taking the digest to pin from the refusal."""
    with pytest.raises(UserError, match="sha256") as refused:
        import_checkpoint(str(directory), None, None, output)
    source = {"kind": "import", "checkpoint": str(directory), "sha256": str(refused.value).split()[-1]}
    return materialise(BaseParams(source=source), 0, output)


def test_a_gpt2_without_padding_token_or_template_samples_and_scores(gpt2, tmp_path):
    made(gpt2, tmp_path / "base")
    tokenizer = load_tokenizer(tmp_path / "base")
    assert tokenizer.pad_token == tokenizer.eos_token
    prompts = [Prompt(tokens, (1, 2)) for tokens in encode_prompts(tokenizer, ["one", "and two"])]
    engine = NativeEngine.open(tmp_path / "base")
    drawn = engine.generate(prompts, Sampling(temperature=1.0, max_new_tokens=5))
    for prompt, tokens, logprobs in zip([prompts[0]] * 2 + [prompts[1]] * 2, drawn.tokens, drawn.logprobs, strict=True):
        with torch.no_grad():
            logits = engine.model(torch.tensor([prompt.tokens + tokens])).logits[0]
        expected = torch.log_softmax(logits, -1)[len(prompt.tokens) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])
        np.testing.assert_allclose(logprobs, expected[:, 0].numpy(), atol=1e-5)
    scorer = RewardModel(reward_model_from(tmp_path / "base"), tokenizer.pad_token_id)
    assert scorer.scores([[5, 6, 7], [8]]).tolist() == [0.0, 0.0]


def test_missing_tensors_are_not_filled_with_random_ones(gpt2, tmp_path):
    weights = load_file(gpt2 / "model.safetensors")
    weights.pop("transformer.h.0.mlp.c_fc.weight")
    save_file(weights, gpt2 / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack 1 tensors of the model, such as transformer\.h\.0\.mlp\.c_fc\.weight"):
        load_model(gpt2)


@pytest.mark.parametrize(
    ("file", "content"),
    [("model.safetensors", b"junk" * 100), ("config.json", b"{"), ("config.json", b'{"model_type": "unheard-of"}')],
)
def test_what_cannot_be_loaded_is_said_in_one_sentence(gpt2, tmp_path, file, content):
    (gpt2 / file).write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be loaded|not valid JSON"):
        made(gpt2, tmp_path / "base")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(gpt2, tmp_path):
    tokenizer = load_tokenizer(gpt2)
    tokenizer.add_tokens([f"word{i}" for i in range(20)])
    tokenizer.save_pretrained(gpt2)
    with pytest.raises(UserError, match="its model only"):
        made(gpt2, tmp_path / "base")
