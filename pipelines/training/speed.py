"""How fast a step was: tokens and samples a second and, on a GPU, the share of its peak that the model's work takes.

Model FLOPs are those of Chowdhery et al. 2022 (PaLM), appendix B: per token 2 for each weight of a matrix product in
the forward pass, 2 more for the gradient of its input, 2 more for its own gradient where it is trained; and 12 x layers
x heads x head size per pair of tokens of a sequence, masked pairs included. What checkpointing computes again is not
counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from pipelines.training.batch import Layout, Unit, common_prefix

# FLOP/s of dense bfloat16 matrix products, from the makers' data sheets; part of the device's name -> peak
_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}


@dataclass(frozen=True)
class Work:
    """What a model computes in one training step: FLOPs per token, and per pair of tokens of a sequence."""

    per_token: float
    per_pair: float

    @classmethod
    def of(cls, model: Any) -> Work | None:
        """The work of `model` as it is trained; None for a mixture of experts, whose tokens take different parts."""
        config = model.config.get_text_config()
        if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            return None
        looked_up = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
        head = model.get_output_embeddings()
        looked_up -= {id(head.weight)} if head is not None else set()
        matrices = [value for value in model.parameters() if value.ndim == 2 and id(value) not in looked_up]
        heads, layers = (getattr(config, name, 0) for name in ("num_attention_heads", "num_hidden_layers"))
        size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        return cls(
            sum((6 if value.requires_grad else 4) * value.numel() for value in matrices), 12 * layers * heads * size
        )

    def flops(self, units: Iterable[Unit], layout: Layout) -> float:
        """FLOPs of a step on `units`; what the layout `shared` reads once counts once."""
        tokens = pairs = 0
        for unit in units:
            lengths = [len(sequence.tokens) for sequence in unit]
            common = common_prefix(unit) if layout == "shared" else 0
            repeats = len(unit) - 1
            tokens += sum(lengths) - repeats * common
            pairs += sum(length**2 for length in lengths) - repeats * common**2
        return self.per_token * tokens + self.per_pair * pairs


def peak(device: torch.device) -> float | None:
    """FLOP/s of the device in dense bfloat16 matrix products; None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAKS.items() if part in name), None)
