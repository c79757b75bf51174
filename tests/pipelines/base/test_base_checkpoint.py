from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError

from pipelines.base.architectures import (
    load_model,
    load_reward_model,
    load_tokenizer,
    reward_model_from,
    save_checkpoint,
)
from pipelines.base.checkpoint import import_checkpoint, initialise, materialise, qwen3_config
from pipelines.base.settings import Architecture, BaseParams, Import, Initialise
from pipelines.base.tokenizer import build_tokenizer
from pipelines.errors import UserError

SMALL = Architecture(hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp=32, rope_theta=1000.0, max_length=64)


def initialised(architecture: Architecture = SMALL) -> BaseParams:
    return BaseParams(source=Initialise(kind="initialise", architecture=architecture))


def imported(checkpoint, sha256=None, revision=None) -> BaseParams:
    return BaseParams(source=Import(kind="import", checkpoint=str(checkpoint), sha256=sha256, revision=revision))


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def copy_to(output, checkpoint, sha256=None, revision=None) -> str:
    return import_checkpoint(imported(checkpoint, sha256, revision).source, output, "base.source")


def pinned(directory) -> str:
    with pytest.raises(UserError, match=r"base\.source\.sha256 is missing") as error:
        copy_to(directory.parent / "unpinned", directory)
    return str(error.value).split()[-1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base") / "checkpoint"
    materialise(initialised(), 0, directory)
    return directory


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(checkpoint, tmp_path):
    materialise(initialised(), 0, tmp_path / "again")
    materialise(initialised(), 1, tmp_path / "other")
    assert files(checkpoint) == files(tmp_path / "again")
    other = files(tmp_path / "other")
    assert other.pop("model.safetensors") != files(checkpoint)["model.safetensors"]
    assert other.items() <= files(checkpoint).items()


def test_published_files_name_no_path(checkpoint, tmp_path):
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files(checkpoint).keys()
    text = "".join(path.read_text() for path in checkpoint.iterdir() if path.suffix == ".json")
    assert str(checkpoint.parent) not in text


def test_the_parameter_count_is_that_of_the_formula(checkpoint):
    vocabulary = len(load_tokenizer(checkpoint))
    attention = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 2 * 8  # queries, keys and values, output, their norms
    layer = attention + 3 * 16 * 32 + 2 * 16
    assert load_model(checkpoint).num_parameters() == vocabulary * 16 + 2 * layer + 16


def test_weights_do_not_depend_on_what_else_there_is():
    """A layer keeps its weights when another one is added behind it, apart from the residual scale."""
    tokenizer = build_tokenizer((), 64)
    deeper = SMALL.model_copy(update={"layers": 3})
    one, two = (dict(initialise(qwen3_config(a, tokenizer), 5).named_parameters()) for a in (SMALL, deeper))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert one[name].equal(two[name])
    scale = (2 * 3) ** 0.5 / (2 * 2) ** 0.5
    name = "model.layers.1.mlp.down_proj.weight"
    assert one[name].allclose(two[name] * scale)


def test_saving_and_loading_changes_nothing(checkpoint, tmp_path):
    save_checkpoint(load_model(checkpoint), load_tokenizer(checkpoint), tmp_path / "copy")
    assert files(tmp_path / "copy") == files(checkpoint)


def test_a_reward_model_starts_at_zero_and_comes_back_from_disk(checkpoint, tmp_path):
    import torch

    model = reward_model_from(checkpoint)
    tokens = torch.tensor([[5, 6, 7]])
    assert model(input_ids=tokens).logits.tolist() == [[0.0]]
    with torch.no_grad():
        model.score.weight.fill_(1.0)
    save_checkpoint(model, load_tokenizer(checkpoint), tmp_path / "reward")
    loaded = load_reward_model(tmp_path / "reward").eval()
    assert loaded(input_ids=tokens).logits.allclose(model.eval()(input_ids=tokens).logits)
    assert loaded.score.weight.eq(1.0).all()


def test_an_import_is_refused_until_it_is_pinned_and_then_copied(checkpoint, tmp_path):
    digest = pinned(checkpoint)
    figures, sha256 = materialise(imported(checkpoint, digest), 0, tmp_path / "copy")
    assert sha256 == digest
    assert figures["vocabulary"] == len(load_tokenizer(checkpoint))
    assert files(tmp_path / "copy") == files(checkpoint)


def test_a_changed_file_does_not_match_the_pin(checkpoint, tmp_path):
    digest = pinned(checkpoint)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in files(checkpoint).items():
        (copy / name).write_bytes(content)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match=f"pins {digest}"):
        copy_to(tmp_path / "out", copy, digest)
    assert not (tmp_path / "out").exists()


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"only pytorch_model\.bin; pickles can run code"):
        copy_to(tmp_path / "out", tmp_path)


def test_the_authors_path_is_dropped(checkpoint, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name, content in files(checkpoint).items():
        (source / name).write_bytes(content)
    config = json.loads((source / "config.json").read_text()) | {"_name_or_path": "/home/somebody/model"}
    (source / "config.json").write_text(json.dumps(config))
    copy_to(tmp_path / "out", source, pinned(source))
    assert "somebody" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("nowhere", None, "no directory nowhere"),
        ("owner/name", None, "40 hex digits, not None"),
        ("owner/name", "main", "not 'main'"),
    ],
)
def test_what_cannot_be_found_is_said(name, revision, message, tmp_path):
    with pytest.raises(UserError, match=message):
        copy_to(tmp_path / "out", name, revision=revision)


def test_a_directory_without_a_config_is_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(tmp_path)


def test_kv_heads_divide_heads():
    with pytest.raises(ValidationError, match="kv_heads must divide heads"):
        Architecture(**(SMALL.model_dump() | {"kv_heads": 3}))


def test_loading_a_model_class_imports_neither_scikit_learn_nor_scipy_and_leaves_them_available():
    code = """
import sys
from pipelines.base.architectures import causal_lm_class
causal_lm_class("qwen3")
assert not {"sklearn", "scipy"} & set(sys.modules)
from transformers.utils import is_sklearn_available, is_scipy_available
import importlib.util
assert is_sklearn_available() == (importlib.util.find_spec("sklearn") is not None)
assert is_scipy_available() == (importlib.util.find_spec("scipy") is not None)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
