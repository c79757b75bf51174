"""Stage `distill`: a smaller student of the RL model. Teacher + data/synthesize -> data/distill (checkpoint)."""

from __future__ import annotations

from pydantic import Field

from pipelines.base.settings import Architecture
from pipelines.distill.settings import DistillationParams
from pipelines.generation.settings import Sampling
from tasks.contract import main
from tasks.execution import Execution
from tasks.samples import verified_samples


class Params(DistillationParams):
    """Section `distill` of params.yaml."""

    teacher: str = Field(description="directory of the teacher's checkpoint: the output of an RL round")
    student: Architecture
    problems: int = Field(ge=1, description="training problems the teacher answers, at the most")
    samples: int = Field(ge=1, description="answers per problem; the right ones are learned from")
    sampling: Sampling


def compute(stage: Execution) -> None:
    from pipelines.base.architectures import load_model, load_tokenizer, save_checkpoint
    from pipelines.base.checkpoint import initialise, qwen3_config
    from pipelines.distill.train import distill, verified_sequences
    from pipelines.generation.rollouts import choose
    from pipelines.records import PROBLEM, ROLLOUT, read, write
    from pipelines.training.loop import history_table

    params: Params = stage.params
    checkpoint = stage.input(params.teacher)
    tokenizer = load_tokenizer(checkpoint)
    problems = read(stage.input("data/synthesize") / "problems.parquet", PROBLEM)
    samples = verified_samples(stage, checkpoint, choose(problems, "train", params.problems, stage.seed))
    rollouts = samples.to_pylist()

    sequences = verified_sequences(rollouts)
    teacher = load_model(checkpoint)
    config = qwen3_config(params.student, tokenizer) | {"vocab_size": teacher.config.vocab_size}
    student = initialise(config, stage.seed)
    history = distill(
        student,
        teacher,
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


if __name__ == "__main__":
    main(compute)
