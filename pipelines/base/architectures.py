"""The one place that imports model classes and reads or writes checkpoints as Hugging Face directories."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.errors import UserError, failures_said_as

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@contextmanager
def light_imports() -> Iterator[None]:
    """While model classes are imported, scikit-learn and SciPy count as not installed.

    transformers imports them for assisted generation and object detection losses, which nothing here uses; that takes
    a third of the import time of a model class. Only the imports inside this block are affected.
    """
    import transformers.utils as utils

    found = {name: getattr(utils, name) for name in ("is_sklearn_available", "is_scipy_available")}
    for name in found:
        setattr(utils, name, lambda: False)
    try:
        yield
    finally:
        for name, function in found.items():
            setattr(utils, name, function)


def causal_lm_class(model_type: str) -> Any:
    """The causal language model class of a configuration's `model_type`."""
    with light_imports():
        if model_type == "qwen3":
            from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

            return Qwen3ForCausalLM
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM


def classifier_class(model_type: str) -> Any:
    """The sequence classification class of a configuration's `model_type`."""
    with light_imports():
        if model_type == "qwen3":
            from transformers.models.qwen3.modeling_qwen3 import Qwen3ForSequenceClassification

            return Qwen3ForSequenceClassification
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification


def load_model(directory: Path) -> PreTrainedModel:
    """The causal language model of a checkpoint directory in float32, on the accelerator if there is one."""
    return _load(causal_lm_class(policy_config(directory).get("model_type", "")), directory)


def policy_config(directory: Path) -> dict[str, Any]:
    """The config.json of a checkpoint that can write answers. Raises UserError for a reward model."""
    config = _read_json(directory / "config.json")
    kinds = config.get("architectures") or [""]
    if str(kinds[0]).endswith("ForSequenceClassification"):
        raise UserError(f"{directory} is a reward model: it scores answers and writes none; name a policy checkpoint")
    return config


def position_limit(model: PreTrainedModel) -> int | None:
    """The longest sequence `model` can take, in tokens; None when its configuration sets no limit.

    Where the rotary positions change with the longest sequence of a batch, the length up to which they do not.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("longrope", "dynamic"):
        original = rope.get("original_max_position_embeddings")
        return original or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
    return getattr(config, "max_position_embeddings", None)


def vocabulary_size(directory: Path) -> int:
    """How many words the head of a policy checkpoint tells apart, from its configuration."""
    config = policy_config(directory)
    return config.get("vocab_size") or config["text_config"]["vocab_size"]


def attention_kinds(model: PreTrainedModel) -> set[str]:
    """What the layers of `model` remember: full_attention, sliding_attention, as `transformers` names it."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False):
        kinds.add("recurrent state")
    if not kinds and getattr(config, "sliding_window", None):
        kinds.add("sliding_attention")
    return kinds or {"full_attention"}


def parameter_count(directory: Path) -> int:
    """How many numbers the weights of a checkpoint are, from the headers of its files; shared tensors count once."""
    import math

    from safetensors import safe_open

    count = 0
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


def load_reward_model(directory: Path) -> PreTrainedModel:
    """The reward model of a checkpoint directory, in float32: a transformer with a scalar head `score`."""
    return _load(classifier_class(_model_type(directory)), directory)


def reward_model_from(directory: Path) -> PreTrainedModel:
    """A reward model that starts from the causal language model in `directory`, its scalar head at zero."""
    import torch

    language_model = load_model(directory)
    config = language_model.config
    config.num_labels = 1
    config.pad_token_id = load_tokenizer(directory).pad_token_id
    cls = classifier_class(config.model_type)
    new = cls.from_config if hasattr(cls, "from_config") else cls._from_config  # the Auto classes spell it otherwise
    model = new(config, dtype=torch.float32)
    model.base_model.load_state_dict(language_model.base_model.state_dict())
    with torch.no_grad():
        model.score.weight.zero_()
    return model


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint directory; one without a padding token pads with its end token.

    Raises UserError when it has no end token: nothing would ever stop a completion.
    """
    tokenizer = _read_tokenizer(directory)
    if tokenizer.eos_token is None:
        raise UserError(f"{directory}: its tokenizer has no end token; name an eos_token in tokenizer_config.json")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _read_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    settings = _read_json(directory / "tokenizer_config.json")
    if settings.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend"):
        from transformers import PreTrainedTokenizerFast as Tokenizer
    else:
        with light_imports():
            from transformers import AutoTokenizer as Tokenizer
    with failures_said_as(f"the tokenizer of {directory} cannot be loaded"):
        return Tokenizer.from_pretrained(directory, local_files_only=True)


def save_checkpoint(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files; the same bytes for the same weights."""
    directory.mkdir(parents=True, exist_ok=True)
    model.config.name_or_path = ""
    tokenizer.name_or_path = ""
    for trace_of_loading in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(trace_of_loading, None)
    _without_progress_bars()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _load(cls: Any, directory: Path) -> PreTrainedModel:
    import torch

    from pipelines.devices import device

    _without_progress_bars()
    _refuse_foreign_shards(directory)
    with failures_said_as(f"the model of {directory} cannot be loaded"):
        model, info = cls.from_pretrained(
            directory,
            output_loading_info=True,
            dtype=torch.float32,
            **_attention(directory),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    lacking = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if lacking:
        raise UserError(
            f"{directory}: its weights lack {len(lacking)} tensors of the model, such as {lacking[0]}, "
            "or have them in another shape"
        )
    model = model.to(device())
    _refuse_infinite_weights(model, str(directory))
    return model


def _without_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def _attention(directory: Path) -> dict[str, str]:
    """The attention to load a checkpoint with: by default SDPA for a model that has it, else its own.

    SDPA leaves out the soft cap that Gemma 2 puts on its scores.
    """
    config = _read_json(directory / "config.json")
    capped = any(part.get("attn_logit_softcapping") for part in (config, config.get("text_config") or {}))
    return {"attn_implementation": "eager"} if capped else {}


def _refuse_foreign_shards(directory: Path) -> None:
    """Raise UserError when the index of the weights names anything but safetensors files beside it."""
    index = directory / "model.safetensors.index.json"
    shards = set((_read_json(index).get("weight_map") or {}).values()) if index.is_file() else ()
    for shard in shards:
        if not str(shard).endswith(".safetensors") or Path(str(shard)).name != shard:
            raise UserError(f"{index} names {shard}, which is no safetensors file beside it; nothing else is loaded")


def _refuse_infinite_weights(model: PreTrainedModel, name: str) -> None:
    """Raise UserError when a weight of `model`, called `name` in the message, is NaN or infinite."""
    for weight, values in model.named_parameters():
        if not values.isfinite().all():
            raise UserError(f"the weights of {name} hold NaN or infinity, as in {weight}; give an undamaged checkpoint")


def _model_type(directory: Path) -> str:
    return _read_json(directory / "config.json").get("model_type", "")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path.parent} is no checkpoint: it has no {path.name}; give a Hugging Face directory")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{path.parent}: its {path.name} is not valid JSON") from None
    if not isinstance(content, dict):
        raise UserError(f"{path.parent}: its {path.name} is valid JSON, but no mapping")
    return content
