"""Stage `synthesize`: problems and demonstrations. params + data/raw + hub -> data/synthesize."""

from __future__ import annotations

from pipelines.synthesis.settings import SynthesizeParams
from tasks.contract import main
from tasks.execution import Execution


class Params(SynthesizeParams):
    """Section `synthesize` of params.yaml."""


def compute(stage: Execution) -> None:
    from pipelines.synthesis.sources import locate
    from pipelines.synthesis.synthesize import synthesize

    for source in stage.params.sources:
        if source.hub is not None:
            path = locate(source, stage.input("data/raw"))
            stage.log_source(source.name, path, {"gitCommit": source.hub.revision})
    counts = synthesize(
        stage.params,
        stage.seed,
        stage.input("data/raw"),
        stage.output,
        lambda done, total: stage.progress(done, total, "problems"),
    )
    for name, count in counts.items():
        stage.log_rows(name, count)
    stage.write_metrics(counts)


if __name__ == "__main__":
    main(compute, network=True)
