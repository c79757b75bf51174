"""What can be switched on in training: moving average, adapters, precision, checkpointing, compilation."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from pipelines.errors import UserError
from pipelines.training import lora
from pipelines.training.batch import Sequence
from pipelines.training.checkpoint import CheckpointStore
from pipelines.training.components import BradleyTerry, TokenComponent, cross_entropy, score_outputs
from pipelines.training.loop import epochs, optimise
from pipelines.training.settings import Compute, Lora, Optimiser, Training
from pipelines.training.trainer import Trainer

CROSS_ENTROPY = TokenComponent("cross_entropy", 1.0, "weight", cross_entropy)


def training(**changes) -> Training:
    optimiser = {"lr": 0.01, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.1, "clip_norm": 1.0}
    compute = {"micro_tokens": 64}
    for section in (optimiser, compute):
        section |= {name: changes.pop(name) for name in list(changes) if name in _FIELDS[id(section) == id(compute)]}
    return Training(optimiser=optimiser, compute=compute, checkpoint_every=2, **changes)


_FIELDS = (Optimiser.model_fields, Compute.model_fields)


def units(count: int = 10):
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 14, count)
    return [(Sequence(rng.integers(2, 32, n), {"weight": np.ones(n, np.float32)}),) for n in lengths]


def train(model, directory, steps=5, **changes):
    trainer = Trainer(model, [CROSS_ENTROPY], training(**changes), steps, 0)
    history = optimise(trainer, steps, epochs(units(), 4, 0), CheckpointStore(directory), 2, lambda *_: None)
    return trainer, history


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_the_moving_average_by_hand(tiny_model):
    model, decay = tiny_model(), 0.75
    trainer = Trainer(model, [CROSS_ENTROPY], training(ema=decay), 3, 0)
    expected = weights(model)
    for _ in range(3):
        trainer.update(units())
        expected = {name: decay * expected[name] + (1 - decay) * value for name, value in weights(model).items()}
    assert not torch.allclose(expected["model.embed_tokens.weight"], model.model.embed_tokens.weight)
    trainer.finish()
    for name, value in weights(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("switches", [{"ema": 0.9}, {"lora": Lora(rank=2, alpha=4.0)}])
def test_a_run_with_a_switch_resumes_to_the_same_bytes(tiny_model, tmp_path, switches):
    whole = tiny_model()
    _, history = train(whole, tmp_path / "whole", **switches)
    train(tiny_model(), tmp_path / "half", steps=2, **switches)  # its schedule is constant, so two steps are a prefix
    resumed = tiny_model()
    assert train(resumed, tmp_path / "half", **switches)[1] == history
    for name, value in weights(whole).items():
        assert torch.equal(weights(resumed)[name], value), name


def test_adapters_change_nothing_until_trained_and_are_merged_exactly(tiny_model, tmp_path):
    plain, model = tiny_model(), tiny_model()
    tokens = torch.arange(2, 14)[None]
    lora.attach(model, Lora(rank=2, alpha=4.0))
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    linear = [name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)]
    adapted = {name.split(".lora_")[0] for name in trained}
    assert adapted == set(linear) - {"lm_head"}

    model = tiny_model()
    trainer = Trainer(model, [CROSS_ENTROPY], training(lora=Lora(rank=2, alpha=4.0)), 3, 0)
    for _ in range(3):
        trainer.update(units())
    logits = model(tokens).logits.detach()
    assert not torch.allclose(logits, plain(tokens).logits, atol=1e-3)
    before, merged = plain.state_dict(), trainer.weights()
    assert merged.keys() == before.keys()
    trainer.finish()
    torch.testing.assert_close(model(tokens).logits.detach(), logits, rtol=0, atol=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, merged[name], rtol=0, atol=1e-6)
    rank = torch.linalg.matrix_rank(
        model.state_dict()["model.layers.0.mlp.up_proj.weight"] - before["model.layers.0.mlp.up_proj.weight"], atol=1e-5
    )
    assert rank == 2
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)


def test_a_merged_model_is_saved_as_an_ordinary_checkpoint(tiny_model, tmp_path):
    from transformers import Qwen3ForCausalLM

    model = tiny_model()
    train(model, tmp_path / "run", lora=Lora(rank=2, alpha=4.0))
    model.save_pretrained(tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert "lora" not in (tmp_path / "saved/config.json").read_text()
    loaded, info = Qwen3ForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(2, 14)[None]
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)
    checkpoint = sorted((tmp_path / "run").glob("tick-*"))[-1]
    assert (checkpoint / "model.safetensors").stat().st_size < (tmp_path / "saved/model.safetensors").stat().st_size


def test_the_head_of_a_reward_model_is_trained_beside_its_adapters(tiny_model):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForSequenceClassification

    config = tiny_model().config
    config.num_labels = 1
    model = Qwen3ForSequenceClassification(config)
    before = model.score.weight.detach().clone()
    pool = [unit[0] for unit in units()]
    trainer = Trainer(model, [BradleyTerry()], training(lora=Lora(rank=2, alpha=4.0)), 1, 0, forward=score_outputs)
    trainer.update(list(zip(pool[::2], pool[1::2], strict=True)))
    trainer.finish()
    assert not torch.equal(model.score.weight, before)
    assert isinstance(model.score, torch.nn.Linear)


def gradient(model, **changes) -> tuple[dict[str, float], torch.Tensor]:
    found = Trainer(model, [CROSS_ENTROPY], training(lr=1e-9, **changes), 1, 0).update(units())
    return found, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_activations_computed_again_give_the_same_gradient(tiny_model):
    assert torch.equal(gradient(tiny_model(), checkpointing=True)[1], gradient(tiny_model())[1])


def test_bfloat16_passes_keep_float32_weights_and_log_probs(tiny_model):
    model = tiny_model()
    seen = {}

    def probe(outputs, batch):
        seen["logp"] = outputs.logp_N.dtype
        return -outputs.logp_N

    component = TokenComponent("cross_entropy", 1.0, "weight", probe)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: seen.update(layer=output.dtype))
    loss = Trainer(model, [component], training(precision="bfloat16"), 1, 0).update(units())["loss/cross_entropy"]
    assert seen == {"logp": torch.float32, "layer": torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert loss == pytest.approx(gradient(tiny_model())[0]["loss/cross_entropy"], rel=0.01)
    assert loss != gradient(tiny_model())[0]["loss/cross_entropy"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.long
def test_a_compiled_model_has_the_same_gradient(tiny_model):
    torch.testing.assert_close(gradient(tiny_model(), compile=True)[1], gradient(tiny_model())[1], rtol=1e-4, atol=1e-6)


def test_a_step_without_anything_to_learn_is_said(tiny_model):
    silent = [(Sequence(np.arange(2, 8), {"weight": np.zeros(6, np.float32)}),)]
    with pytest.raises(UserError, match="update 1: none of the tokens of its 1 units is to be learned"):
        Trainer(tiny_model(), [CROSS_ENTROPY], training(), 1, 0).update(silent)


def test_a_layout_that_a_model_would_misread_is_refused():
    from transformers import MistralConfig, MistralForCausalLM

    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    model = MistralForCausalLM(MistralConfig(sliding_window=4, **shape, **heads))
    Trainer(model, [CROSS_ENTROPY], training(layout="packed"), 1, 0)
    with pytest.raises(UserError, match="shared does not fit a MistralForCausalLM with sliding_attention; use padded"):
        Trainer(model, [CROSS_ENTROPY], training(layout="shared"), 1, 0)


WORDS = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}


def gpt2(**changes):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **WORDS, **changes))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_off_so_that_a_step_depends_on_weights_and_units_only(checkpointing):
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    expected = gradient(gpt2(**quiet), checkpointing=checkpointing)[1]
    for _ in range(2):
        assert torch.equal(gradient(gpt2(), checkpointing=checkpointing)[1], expected)


def test_dropout_inside_a_layer_that_computes_again_is_off_too():
    from transformers import OPTConfig, OPTForCausalLM

    shape = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2}

    def opt(dropout: float):
        torch.manual_seed(0)
        return OPTForCausalLM(OPTConfig(**WORDS, **shape, word_embed_proj_dim=16, dropout=dropout))

    assert torch.equal(gradient(opt(0.5), checkpointing=True)[1], gradient(opt(0.0))[1])


def test_a_layout_is_tried_not_believed():
    """Falcon does not tell its attention where a sequence begins."""
    from transformers import FalconConfig, FalconForCausalLM

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = FalconForCausalLM(FalconConfig(**WORDS, **shape, alibi=False))
    Trainer(model, [CROSS_ENTROPY], training(layout="padded"), 1, 0)
    with pytest.raises(UserError, match="packed does not fit a FalconForCausalLM, which reads a sequence differently"):
        Trainer(model, [CROSS_ENTROPY], training(layout="packed"), 1, 0)


def test_weights_that_never_had_a_gradient_do_not_stand_in_the_way_of_a_resume(tiny_model, tmp_path):
    def model():
        made = tiny_model()
        made.unused = torch.nn.Parameter(torch.ones(3))
        return made

    def run(made, directory, steps):
        trainer = Trainer(made, [CROSS_ENTROPY], training(), 6, 0)
        optimise(trainer, steps, lambda step: ([units()], {}), CheckpointStore(directory), 2, lambda *_: None)
        return torch.cat([parameter.detach().flatten() for parameter in made.parameters()])

    run(model(), tmp_path / "stopped", 4)
    assert torch.equal(run(model(), tmp_path / "stopped", 6), run(model(), tmp_path / "whole", 6))


def test_lora_that_a_model_cannot_take_is_said(tiny_model, monkeypatch):
    def refuse(*arguments):
        raise ValueError("Module 'out_proj' is incompatible")

    monkeypatch.setattr("peft.inject_adapter_in_model", refuse)
    with pytest.raises(UserError, match="lora does not fit a Qwen3ForCausalLM; leave it out: Module 'out_proj'"):
        Trainer(tiny_model(), [CROSS_ENTROPY], training(lora=Lora(rank=2, alpha=1.0)), 1, 0)
