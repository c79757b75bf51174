"""Stage `evaluate`: all checkpoints on the same held-out problems -> data/evaluate (metrics, samples, report)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from pipelines.evaluate.settings import Reporting
from pipelines.generation.settings import EngineParams, Sampling
from pipelines.settings import Strict
from tasks.contract import main
from tasks.execution import Execution
from tasks.settings import Round, values


class Params(Strict):
    """Section `evaluate` of params.yaml."""

    samples: int = Field(ge=1, description="answers per held-out problem and checkpoint")
    sampling: Sampling
    reporting: Reporting
    engine: EngineParams | None = Field(default=None, description="what samples here; null is as in the other stages")


def checkpoints(rounds: Mapping[str, Round], teacher: str) -> tuple[dict[str, str], dict[str, str]]:
    """Checkpoint name -> directory, oldest first, and checkpoint name -> the name of what it was trained from."""
    directories = {"base": "data/base", "sft": "data/sft"}
    directories |= {f"rl@{key}": f"data/rl/{key}" for key in rounds}
    directories |= {"student": "data/distill"}
    names = {directory: name for name, directory in directories.items()}
    parents = {"sft": "base"}
    parents |= {f"rl@{key}": names.get(round_.init) for key, round_ in rounds.items()}
    parents |= {"student": names.get(teacher)}
    return directories, {name: parent for name, parent in parents.items() if parent}  # others come from elsewhere


def compute(stage: Execution) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    from pipelines.errors import UserError
    from pipelines.evaluate import curves, plots, report, summary
    from pipelines.evaluate.sampling import sample_checkpoint
    from pipelines.records import DECISION, PROBLEM, ROLLOUT, read, write
    from pipelines.rewards.model import RewardModel

    params: Params = stage.params
    problems = read(stage.input("data/synthesize") / "problems.parquet", PROBLEM)
    problems = problems.filter(pc.equal(problems["split"], "test"))
    if not problems.num_rows:
        raise UserError(
            "evaluate: data/synthesize holds no held-out problem; raise synthesize.test_per_level or test_share"
        )
    reward_model = RewardModel.load(stage.input("data/reward"))
    directories, parents = checkpoints(
        stage.settings.rounds, values(Path.cwd(), ["distill.teacher"])["distill.teacher"]
    )
    samples: dict[str, pa.Table] = {}
    parameters: dict[str, int] = {}
    for number, (name, directory) in enumerate(directories.items()):
        note = f"{name}, checkpoint {number + 1} of {len(directories)}"
        samples[name], parameters[name] = sample_checkpoint(
            params.engine or stage.engine,
            stage.input(directory),
            name,
            problems,
            params.samples,
            params.sampling,
            reward_model,
            stage.seed,
            lambda done, total, unit, note=note, number=number: stage.progress(
                number * total + done, len(directories) * total, unit, note
            ),
        )
    metrics = summary.summarise(
        samples, parameters=parameters, seed=stage.seed, resamples=params.reporting.resamples, parents=parents
    )
    training = {
        f"rl@{key}": curves.training_curve(read(stage.input(f"data/rl/{key}") / "rollouts.parquet", ROLLOUT))
        for key in stage.settings.rounds
    }
    decisions = read(stage.input("data/filter") / "decisions.parquet", DECISION)
    drawn = plots.draw(metrics, training, decisions)
    page = report.render(metrics, drawn, samples, problems, transcripts=params.reporting.transcripts)

    output = stage.output
    output.mkdir(parents=True, exist_ok=True)
    (output / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    (output / "report.html").write_text(page, encoding="utf-8")
    (output / "plots").mkdir(exist_ok=True)
    for name, png in drawn.items():
        (output / "plots" / f"{name}.png").write_bytes(png)
    write(output / "samples.parquet", pa.concat_tables(samples.values()), ROLLOUT)
    stage.log_rows("problems", problems.num_rows)
    stage.log_rows("samples", sum(table.num_rows for table in samples.values()))
    stage.log_result({f"accuracy/{name}": found["accuracy"]["mean"] for name, found in metrics["checkpoints"].items()})


if __name__ == "__main__":
    main(compute)
