"""A trained reward model as a scorer of token sequences. Legend: R sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import torch

from pipelines.training.batch import Sequence, micro_batches
from pipelines.training.components import score_outputs


class RewardModel:
    """Scores prompt + completion with a scalar head; loaded from a published `reward` checkpoint."""

    def __init__(self, model: torch.nn.Module, pad_id: int, micro_tokens: int = 8192):
        self.model, self.pad_id, self.micro_tokens = model.eval(), pad_id, micro_tokens

    @classmethod
    def load(cls, directory: Path) -> RewardModel:
        from pipelines.base.architectures import load_reward_model

        model = load_reward_model(directory)
        return cls(model, model.config.pad_token_id)

    @torch.inference_mode()
    def scores(self, sequences: Seq[Seq[int]]) -> np.ndarray:
        """scores_R: the raw score (a logit) of each token sequence, float64, in the order given."""
        scores_R = np.zeros(len(sequences))
        device = next(self.model.parameters()).device
        units = [(Sequence(np.asarray(tokens)),) for tokens in sequences]
        for batch in micro_batches(units, "padded", self.micro_tokens, self.pad_id, device):
            scores_R[list(batch.units)] = score_outputs(self.model, batch).scores_S.double().cpu().numpy()
        return scores_R
