"""Stage `filter`: which problems teach the SFT model. data/sft + data/synthesize -> data/filter (kept problems)."""

from __future__ import annotations

import json

from pydantic import Field, model_validator

from pipelines.generation.settings import Sampling
from pipelines.settings import Strict
from tasks.contract import main
from tasks.execution import Execution
from tasks.samples import verified_samples


class PassRates(Strict):
    """An inclusive band of pass rates."""

    low: float = Field(ge=0, le=1, description="problems solved less often are dropped as too hard")
    high: float = Field(ge=0, le=1, description="problems solved more often are dropped as too easy")

    @model_validator(mode="after")
    def _ordered(self) -> PassRates:
        if self.low > self.high:
            raise ValueError(f"low must not be above high, {self.low:g} is above {self.high:g}")
        return self


class Params(Strict):
    """Section `filter` of params.yaml."""

    problems: int = Field(ge=1, description="training problems to sample answers for, at the most")
    samples: int = Field(ge=2, description="answers per problem")
    sampling: Sampling
    keep: PassRates


def compute(stage: Execution) -> None:
    import pyarrow.compute as pc

    from pipelines.errors import UserError
    from pipelines.filtering.passrate import decide, histogram
    from pipelines.generation.rollouts import choose
    from pipelines.records import DECISION, PROBLEM, ROLLOUT, read, write

    params: Params = stage.params
    checkpoint = stage.input("data/sft")
    problems = read(stage.input("data/synthesize") / "problems.parquet", PROBLEM)
    tried = choose(problems, "train", params.problems, stage.seed)
    samples = verified_samples(stage, checkpoint, tried)
    rollouts = samples.to_pylist()
    problems = problems.filter(pc.equal(problems["split"], "train"))
    decisions = decide(problems, rollouts, params.keep.low, params.keep.high)
    kept = problems.filter(decisions["kept"])
    if not kept.num_rows:
        raise UserError(
            f"filter: none of {tried.num_rows} problems has a pass rate from {params.keep.low:g} "
            f"to {params.keep.high:g} under data/sft; widen filter.keep in params.yaml, or train sft longer"
        )
    write(stage.output / "problems.parquet", kept, PROBLEM)
    write(stage.output / "decisions.parquet", decisions, DECISION)
    write(stage.output / "samples.parquet", samples, ROLLOUT)
    bars = histogram(decisions, params.samples)
    (stage.output / "histogram.json").write_text(json.dumps(bars, indent=1) + "\n")
    stage.log_rows("tried", tried.num_rows)
    stage.log_rows("kept", kept.num_rows)
    stage.log_rows("samples", len(rollouts))
    pass_rate = sum(row["correct"] for row in rollouts) / len(rollouts)
    stage.write_metrics({"tried": tried.num_rows, "kept": kept.num_rows, "pass_rate": pass_rate})


if __name__ == "__main__":
    main(compute)
