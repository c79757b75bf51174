"""Parameters of sampling. Light at import: no torch."""

from __future__ import annotations

from pydantic import Field

from pipelines.settings import Strict


class Sampling(Strict):
    """How completions are drawn. Always the full support: no top-p, no top-k, so log-probs are unbiased."""

    temperature: float = Field(gt=0, le=10, description="softmax temperature; 1 is the model's own distribution")
    max_new_tokens: int = Field(
        ge=1, le=65536, description="tokens after which a completion is cut (finish reason: length)"
    )
