"""Making the starting checkpoint: initialised from a seed, or imported and pinned by a digest."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.base.architectures import causal_lm_class, load_model, load_tokenizer, policy_config, save_checkpoint
from pipelines.base.fitness import refuse_unfit
from pipelines.base.settings import Architecture, BaseParams, Import
from pipelines.base.tokenizer import build_tokenizer
from pipelines.environments.families import lexicon
from pipelines.errors import UserError
from pipelines.files import sha256
from pipelines.hub import fetch_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_KEPT = (".json", ".safetensors", ".txt", ".model", ".jinja")


def materialise(params: BaseParams, seed: int, output: Path) -> tuple[dict[str, float], str | None]:
    """Write the starting checkpoint with its tokenizer to `output`.

    Returns its parameter count and vocabulary size, and the digest of the files it was imported from, if it was.
    """
    source, digest = params.source, None
    if source.kind == "initialise":
        tokenizer = build_tokenizer(lexicon(), source.architecture.max_length)
        model = initialise(qwen3_config(source.architecture, tokenizer), seed)
        save_checkpoint(model, tokenizer, output)
    else:
        digest = import_checkpoint(source, output, "base.source")
        model, tokenizer = load_imported(source, output, "base.source")
    return {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)}, digest


def load_imported(source: Import, directory: Path, key: str) -> tuple[Any, Any]:
    """Model and tokenizer as the later stages will load them; what is wrong with them is said here, once."""
    with _named_as_written(source, directory, key):
        model, tokenizer = load_model(directory), load_tokenizer(directory)
        refuse_unfit(model, tokenizer, str(directory))
    return model, tokenizer


@contextmanager
def _named_as_written(source: Import, directory: Path, key: str) -> Iterator[None]:
    """What a UserError says of `directory`, an absolute path, it says of the name that params.yaml has for it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}.checkpoint: {error}".replace(str(directory), source.checkpoint)) from error


def qwen3_config(architecture: Architecture, tokenizer: Any) -> dict[str, Any]:
    """The keyword arguments of `Qwen3Config` for `architecture` with the vocabulary of `tokenizer`."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": architecture.hidden,
        "num_hidden_layers": architecture.layers,
        "num_attention_heads": architecture.heads,
        "num_key_value_heads": architecture.kv_heads,
        "head_dim": architecture.head_dim,
        "intermediate_size": architecture.mlp,
        "max_position_embeddings": architecture.max_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": architecture.rope_theta},
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }


def initialise(config: Mapping[str, Any], seed: int) -> PreTrainedModel:
    """A Qwen3 model with weights that depend on (config, seed, parameter name) only.

    Matrices are normal, with standard deviation 0.02 at a width of 768 and in proportion to 1/sqrt(width) elsewhere
    (small models hardly learn at 0.02), those that write into the residual stream smaller by sqrt(2 x layers)
    (Radford et al. 2019, section 2.3); norms are 1.
    """
    import torch
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

    model_class = causal_lm_class("qwen3")
    model = model_class._from_config(Qwen3Config(**config), dtype=torch.float32)
    width_std = 0.02 * (768 / model.config.hidden_size) ** 0.5
    residual_std = width_std / (2 * model.config.num_hidden_layers) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else width_std
            parameter.normal_(0.0, std, generator=generator)
    return model


def import_checkpoint(source: Import, output: Path, key: str) -> str:
    """Copy a local Hugging Face directory, or a commit of a hub repository, to `output`; returns the files' digest.

    Only configuration, tokenizer and safetensors files are taken. key: where params.yaml has `source`. Raises UserError
    when there are pickled weights and no safetensors, no configuration of a policy, when a local directory is not
    pinned by its digest (the message gives it) or the digest is another one.
    """
    name = source.checkpoint
    directory = Path(name).expanduser().absolute()
    is_local = directory.is_dir()
    if is_local and source.revision is not None:
        raise UserError(f"{key}.revision is for hub checkpoints; leave it out for a local directory")
    if not is_local:
        directory = _download(source, key)
    kept = [path for path in sorted(directory.iterdir()) if path.is_file() and path.suffix in _KEPT]
    if not any(path.suffix == ".safetensors" for path in kept):
        pickles = [path.name for path in directory.iterdir() if path.suffix in _PICKLES]
        found = (
            f"only {', '.join(sorted(pickles))}; pickles can run code, so they are refused" if pickles else "no weights"
        )
        raise UserError(f"{key}.checkpoint: {name} has {found}. Give a checkpoint with *.safetensors files")
    with _named_as_written(source, directory, key):
        policy_config(directory)
    digest = files_sha256(kept)
    if source.sha256 is None and is_local:
        raise UserError(
            f"{key}.sha256 is missing: the files of {name} are not pinned. "
            f"If you trust them, set {key}.sha256 to {digest}"
        )
    if source.sha256 not in (None, digest):
        raise UserError(
            f"{key}.sha256: {name} has digest {digest}, params.yaml pins {source.sha256}. "
            "The files are not the ones that were pinned"
        )
    output.mkdir(parents=True, exist_ok=True)
    for path in kept:
        shutil.copyfile(path, output / path.name)
    _scrub(output / "config.json")
    return digest


def files_sha256(paths: list[Path]) -> str:
    """One digest over the names and contents of `paths`, in order of name."""
    digests = {path.name: sha256(path) for path in paths}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _download(source: Import, key: str) -> Path:
    name, revision = source.checkpoint, source.revision
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{key}.checkpoint: there is no directory {name}, and it is no hub name (owner/name)")
    if revision is None or not re.fullmatch("[0-9a-f]{40}", revision):
        raise UserError(f"{key}.revision: give the commit of {name} on the hub, 40 hex digits, not {revision!r}")
    return fetch_model(name, revision, [f"*{suffix}" for suffix in _KEPT], f"{key}.checkpoint")


def _scrub(path: Path) -> None:
    """Drop the path that the checkpoint's author had it under."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.pop("_name_or_path", None) is not None:
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
