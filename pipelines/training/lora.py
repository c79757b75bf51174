"""Low-rank adapters by `peft`, inside the model that a stage holds: attached before training, merged after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.errors import failures_said_as
from pipelines.training.settings import Lora
from pipelines.training.team import whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ADAPTER = "default"


def attach(model: torch.nn.Module, settings: Lora, seed: int = 0) -> None:
    """Give every linear layer but the head an adapter that changes nothing yet; freeze all else but a score head."""
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    head = model.get_output_embeddings() or getattr(model, "score", None)
    linear = [
        name for name, layer in model.named_modules() if isinstance(layer, _linear_layers()) and layer is not head
    ]
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=linear, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # the adapters' A matrices; B begins at 0
        with failures_said_as(f"lora does not fit a {type(model).__name__}; leave it out"):
            inject_adapter_in_model(config, model)
    if hasattr(model, "score"):
        model.score.requires_grad_(True)


def merge(model: torch.nn.Module) -> None:
    """Add the adapters to the weights and take them out of the model, which is then an ordinary one again."""
    for parent, name, layer in _layers(model):
        layer.merge(safe_merge=True)
        setattr(parent, name, layer.get_base_layer())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for leftover in ("peft_config", "_hf_peft_config_loaded"):
        model.__dict__.pop(leftover, None)


def merged_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """The weights the model would have after `merge`, by their ordinary names; the model stays as it is."""
    state = {name: whole(tensor) for name, tensor in model.state_dict().items() if ".lora_" not in name}
    weights = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items()}
    names = {id(layer): name for name, layer in model.named_modules()}
    for _, _, layer in _layers(model):
        name = f"{names[id(layer)]}.weight"
        weights[name] = weights[name] + whole(layer.get_delta_weight(_ADAPTER))
    return weights


def _linear_layers() -> tuple[type, ...]:
    import torch
    from transformers.pytorch_utils import Conv1D  # the linear layer of GPT-2

    return torch.nn.Linear, Conv1D


def _layers(model: torch.nn.Module) -> list[tuple[Any, str, Any]]:
    """(parent, attribute, layer) of every layer with an adapter."""
    from peft.tuners.lora import LoraLayer

    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, LoraLayer)
    ]
