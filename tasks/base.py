"""Stage `base`: the starting checkpoint and tokenizer, initialised or imported. params -> data/base (checkpoint)."""

from __future__ import annotations

from pathlib import Path

from pipelines.base.settings import BaseParams
from tasks.contract import main
from tasks.execution import Execution


class Params(BaseParams):
    """Section `base` of params.yaml."""


def compute(stage: Execution) -> None:
    from pipelines.base.checkpoint import materialise

    stage.progress(0, 1, "checkpoint")
    source = stage.params.source
    figures, sha256 = materialise(stage.params, stage.seed, stage.output)
    if sha256 is not None:
        digest = {"sha256": sha256} | ({"gitCommit": source.revision} if source.revision else {})
        stage.log_source(Path(source.checkpoint).name, digest=digest)
    stage.write_metrics(figures)
    stage.progress(1, 1, "checkpoint")


if __name__ == "__main__":
    main(compute, network=True)
