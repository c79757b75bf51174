"""Verified samples of a checkpoint inside a stage: drawn once, read back by a stage that was killed after that."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.execution import Execution

if TYPE_CHECKING:
    import pyarrow as pa


def verified_samples(stage: Execution, checkpoint: Path, problems: pa.Table) -> pa.Table:
    """`params.samples` rollouts per problem under `params.sampling`, problem-major, as a table of records.ROLLOUT."""
    from pipelines.files import sha256, write_whole
    from pipelines.generation.engines import open_engine
    from pipelines.generation.rollouts import encode_problems, rollout_table, sample_in_parts
    from pipelines.records import ROLLOUT, read, write
    from pipelines.training.team import Team

    team = Team()
    drawn, digest = stage.scratch / "samples.parquet", stage.scratch / "samples.sha256"
    if team.tell(digest.exists() and drawn.exists() and digest.read_text() == sha256(drawn)):
        return read(drawn, ROLLOUT)
    engine = open_engine(stage.engine, checkpoint)
    rollouts = sample_in_parts(
        engine,
        engine.tokenizer,
        encode_problems(engine.tokenizer, problems),
        stage.params.samples,
        stage.params.sampling,
        seed=stage.seed,
        stage=stage.name,
        progress=stage.progress,
    )
    engine.close()
    table = rollout_table(rollouts)
    if team.is_first:
        write_whole(drawn, lambda path: write(path, table, ROLLOUT))
        write_whole(digest, lambda path: path.write_text(sha256(drawn)))
    team.wait()
    return table
