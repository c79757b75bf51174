"""Checkpoints of other architectures, as they come: without padding token or template, damaged, or incomplete."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.base.architectures import load_model, load_tokenizer, position_limit, reward_model_from
from pipelines.base.checkpoint import import_checkpoint, materialise
from pipelines.base.settings import BaseParams, Import
from pipelines.base.tokenizer import build_tokenizer, encode_prompts
from pipelines.errors import UserError
from pipelines.generation.engine import Prompt
from pipelines.generation.native import NativeEngine
from pipelines.generation.settings import Sampling
from pipelines.rewards.model import RewardModel

WEIGHT = "transformer.h.0.mlp.c_fc.weight"


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
    try:
        import_checkpoint(Import(kind="import", checkpoint=str(directory)), output, "base.source")
    except UserError as refused:
        if "base.source.sha256 is missing" not in str(refused):
            raise
        digest = str(refused).split()[-1]
    source = {"kind": "import", "checkpoint": str(directory), "sha256": digest}
    return materialise(BaseParams(source=source), 0, output)[0]


def refusal(directory, output) -> str:
    """What the import of `directory` says, which must name it as params.yaml does, not where its copy is."""
    with pytest.raises(UserError) as refused:
        made(directory, output)
    said = str(refused.value)
    assert said.startswith("base.source.checkpoint: ") and str(directory) in said
    assert str(output) not in said and "\n" not in said
    return said


def change(path, **settings):
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def change_weights(directory, name, tensor):
    weights = load_file(directory / "model.safetensors")
    weights.pop(name)
    save_file(weights | ({} if tensor is None else {name: tensor}), directory / "model.safetensors", {"format": "pt"})


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


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (None, f"lack 1 tensors of the model, such as {WEIGHT}"),
        (torch.zeros(3, 3), f"such as {WEIGHT}, or have them in another shape"),
        (torch.full((16, 64), torch.nan), f"hold NaN or infinity, as in {WEIGHT}"),
        (torch.zeros(16, 64).index_fill(1, torch.tensor(3), -torch.inf), f"hold NaN or infinity, as in {WEIGHT}"),
        (torch.full((16, 64), 3e38), "predicts NaN after a plain question"),
    ],
)
def test_weights_that_are_missing_or_no_numbers_are_refused(gpt2, tmp_path, tensor, said):
    change_weights(gpt2, WEIGHT, tensor)
    assert said in refusal(gpt2, tmp_path / "base")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model.safetensors", b"junk" * 100, "cannot be loaded: Error while deserializing header"),
        ("config.json", None, "has no config.json"),
        ("config.json", b"{", "its config.json is not valid JSON"),
        ("config.json", b"[]", "its config.json is valid JSON, but no mapping"),
        ("config.json", b'{"model_type": "unheard-of"}', "`unheard-of`"),
        ("config.json", b'{"architectures": ["GPT2ForSequenceClassification"]}', "is a reward model"),
        ("tokenizer_config.json", None, "has no tokenizer_config.json"),
        ("tokenizer.json", None, "the tokenizer of"),
        ("tokenizer.json", b"{}", "the tokenizer of"),
    ],
)
def test_a_file_that_is_missing_or_damaged_is_said_in_one_sentence(gpt2, tmp_path, file, content, said):
    if content is None:
        (gpt2 / file).unlink()
    else:
        (gpt2 / file).write_bytes(content)
    assert said in refusal(gpt2, tmp_path / "base")


def test_a_masked_language_model_is_no_policy(gpt2, tmp_path):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=400, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertForMaskedLM(config).save_pretrained(gpt2)
    assert "is no causal language model: what its BertLMHeadModel" in refusal(gpt2, tmp_path / "base")


def test_a_config_need_not_name_its_architecture(gpt2, tmp_path):
    change(gpt2 / "config.json", architectures=None)
    made(gpt2, tmp_path / "base")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('a system message is needed') }}", "a system message is needed"),
        ("{% for message in messages %}", "the chat template of"),
        ("{{ messages[0]['content'] + 1 }}", "the chat template of"),
        ("What is 1 + 1?", "two different questions into the same tokens"),
    ],
)
def test_a_chat_template_that_cannot_ask_is_refused(gpt2, tmp_path, template, said):
    tokenizer = load_tokenizer(gpt2)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(gpt2)
    assert said in refusal(gpt2, tmp_path / "base")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(gpt2, tmp_path):
    tokenizer = load_tokenizer(gpt2)
    tokenizer.add_tokens([f"word{i}" for i in range(20)])
    tokenizer.save_pretrained(gpt2)
    assert "its model only" in refusal(gpt2, tmp_path / "base")


def test_a_tokenizer_without_end_token_is_refused(gpt2, tmp_path):
    change(gpt2 / "tokenizer_config.json", eos_token=None)
    assert "its tokenizer has no end token" in refusal(gpt2, tmp_path / "base")


def test_a_model_without_positions_for_a_question_is_refused(gpt2, tmp_path):
    change(gpt2 / "config.json", n_positions=8)
    change_weights(gpt2, "transformer.wpe.weight", torch.zeros(8, 16))
    assert "has 8 positions, too few for a question of 9 tokens" in refusal(gpt2, tmp_path / "base")


def test_a_relative_path_is_named_as_it_is_written(gpt2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (gpt2 / "config.json").unlink()
    with pytest.raises(UserError, match=r"base\.source\.checkpoint: \./a model is no checkpoint"):
        import_checkpoint(Import(kind="import", checkpoint="./a model"), tmp_path / "base", "base.source")


def test_a_model_whose_config_sets_no_limit_has_none(tmp_path):
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = RecurrentGemmaConfig(vocab_size=400, num_hidden_layers=3, head_dim=8, **shape)
    directory = tmp_path / "model"
    RecurrentGemmaForCausalLM(config).save_pretrained(directory)
    build_tokenizer((), 64).save_pretrained(directory)
    made(directory, tmp_path / "base")
    assert position_limit(load_model(tmp_path / "base")) is None


def test_capped_attention_scores_stay_capped(tmp_path):
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attn_logit_softcapping": 0.5}
    config = Gemma2Config(**shape, **heads, initializer_range=1.0, query_pre_attn_scalar=1)
    torch.manual_seed(0)
    model = Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    tokens = torch.arange(3, 15)[None]
    from pipelines.base.architectures import load_model

    torch.testing.assert_close(load_model(tmp_path).eval()(tokens).logits, model(tokens).logits)


def test_an_index_that_names_pickles_is_refused(gpt2, tmp_path):
    """Nothing but safetensors files beside the index is ever opened."""
    (gpt2 / "model.safetensors").rename(gpt2 / "model-00001-of-00002.safetensors")
    torch.save({}, gpt2 / "weights.bin")
    for shard in ("weights.bin", "../other/model.safetensors"):
        (gpt2 / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {WEIGHT: shard}}))
        with pytest.raises(UserError, match=rf"names {shard}, which is no safetensors file beside it"):
            load_model(gpt2)


def test_a_checkpoint_whose_weights_are_no_numbers_is_refused_by_every_stage_that_reads_it(gpt2, tmp_path):
    change_weights(gpt2, WEIGHT, torch.full((16, 64), torch.nan))
    with pytest.raises(UserError, match=f"a model hold NaN or infinity, as in {WEIGHT}"):
        load_model(gpt2)


def test_a_model_without_sdpa_is_read_with_its_own_attention(tmp_path):
    from transformers import BloomConfig, BloomForCausalLM

    tokenizer = build_tokenizer((), 64)
    tokenizer.save_pretrained(tmp_path / "bloom")
    ends = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    BloomForCausalLM(
        BloomConfig(vocab_size=len(tokenizer), hidden_size=16, n_layer=1, n_head=2, **ends)
    ).save_pretrained(tmp_path / "bloom")
    made(tmp_path / "bloom", tmp_path / "base")


def test_positions_that_change_with_the_longest_sequence_end_where_they_do(tmp_path):
    from transformers import Phi3Config, Phi3ForCausalLM

    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = Phi3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        pad_token_id=0,
        rope_parameters=rope,
    )
    assert position_limit(Phi3ForCausalLM(config)) == 16
