"""Parameters of what the evaluate stage makes of its samples. Light at import: no torch."""

from __future__ import annotations

from pydantic import Field

from pipelines.settings import Strict


class Reporting(Strict):
    """How uncertainty is estimated and how much of the samples the report shows."""

    resamples: int = Field(
        ge=100, le=1_000_000, description="bootstrap resamples of the problems behind every interval"
    )
    transcripts: int = Field(ge=0, le=100, description="problems per family whose completions report.html shows")
