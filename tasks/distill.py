"""Stage `distill`: a smaller student of the RL model. Teacher + data/synthesize -> data/distill (checkpoint)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from pipelines.base.settings import Origin
from pipelines.distill.settings import DistillationParams
from pipelines.generation.settings import Sampling
from tasks.contract import main
from tasks.execution import Execution
from tasks.samples import verified_samples


class Params(DistillationParams):
    """Section `distill` of params.yaml."""

    teacher: str = Field(description="directory of the teacher's checkpoint: the output of an RL round")
    student: Origin
    problems: int = Field(ge=1, description="training problems the teacher answers, at the most")
    samples: int = Field(ge=1, description="answers per problem; the right ones are learned from")
    sampling: Sampling


def compute(stage: Execution) -> None:
    from pipelines.base.architectures import load_model, load_tokenizer, save_checkpoint, vocabulary_size
    from pipelines.distill.train import distill, verified_sequences
    from pipelines.generation.rollouts import choose
    from pipelines.records import PROBLEM, ROLLOUT, read, write
    from pipelines.training.loop import history_table

    params: Params = stage.params
    checkpoint = stage.input(params.teacher)
    tokenizer = load_tokenizer(checkpoint)
    student = _student(stage, vocabulary_size(checkpoint), tokenizer)
    problems = read(stage.input("data/synthesize") / "problems.parquet", PROBLEM)
    samples = verified_samples(stage, checkpoint, choose(problems, "train", params.problems, stage.seed))
    rollouts = samples.to_pylist()

    sequences = verified_sequences(rollouts)
    history = distill(
        student,
        load_model(checkpoint),
        sequences,
        params,
        pad_id=tokenizer.pad_token_id,
        seed=stage.seed,
        scratch=stage.scratch,
        report=stage.report,
    )
    save_checkpoint(student, tokenizer, stage.output)
    write(stage.output / "samples.parquet", samples, ROLLOUT)
    history_table(history, stage.output / "history.parquet")
    stage.log_rows("samples", len(rollouts))
    stage.log_rows("verified", len(sequences))
    losses = {name: value for name, value in history[-1].items() if name.startswith("loss/")}
    stage.write_metrics({"verified_share": len(sequences) / len(rollouts)} | losses)


def _student(stage: Execution, vocabulary: int, tokenizer: Any) -> Any:
    """The student as it starts. Raises UserError for an imported one that has other tokens than the teacher.

    vocabulary, tokenizer: the teacher's.
    """
    from pipelines.base.checkpoint import import_checkpoint, initialise, load_imported, qwen3_config
    from pipelines.errors import UserError
    from pipelines.training.team import Team

    source, team = stage.params.student, Team()
    if source.kind == "initialise":
        config = qwen3_config(source.architecture, tokenizer) | {"vocab_size": vocabulary}
        return initialise(config, stage.seed)
    directory = stage.scratch / "student"
    if team.is_first:
        digest = {"sha256": import_checkpoint(source, directory, "distill.student")}
        digest |= {"gitCommit": source.revision} if source.revision else {}
        stage.log_source(Path(source.checkpoint).name, digest=digest)
    team.wait()
    student, own = load_imported(source, directory, "distill.student")
    if own.get_vocab() != tokenizer.get_vocab() or student.config.get_text_config().vocab_size != vocabulary:
        raise UserError(
            f"distill.student.checkpoint: {source.checkpoint} has other tokens than the teacher; only models of one "
            "family, with the same tokenizer, can learn from each other's distributions"
        )
    return student


if __name__ == "__main__":
    main(compute, network=True)
