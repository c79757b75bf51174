"""Stage `filter`: which problems teach the SFT model. data/sft + data/synthesize -> data/filter (problems, decisions, samples)."""

from __future__ import annotations

import json

from pydantic import Field

from pipelines.generation.settings import Sampling
from pipelines.records import DECISION, PROBLEM, ROLLOUT, read, write
from pipelines.settings import Strict
from tasks.contract import Execution, main


class PassRates(Strict):
    """An inclusive band of pass rates."""

    low: float = Field(ge=0, le=1, description="problems solved less often are dropped as too hard")
    high: float = Field(ge=0, le=1, description="problems solved more often are dropped as too easy")


class Params(Strict):
    """Section `filter` of params.yaml."""

    samples: int = Field(ge=2, description="answers sampled per training problem")
    sampling: Sampling
    keep: PassRates


def compute(stage: Execution) -> None:
    import pyarrow.compute as pc

    from pipelines.base.architectures import load_tokenizer
    from pipelines.errors import UserError
    from pipelines.filtering.passrate import decide, histogram
    from pipelines.generation.native import NativeEngine
    from pipelines.generation.rollouts import encode_problems, rollout_table, sample_in_parts

    params: Params = stage.params
    checkpoint = stage.input("data/sft")
    problems = read(stage.input("data/synthesize") / "problems.parquet", PROBLEM)
    problems = problems.filter(pc.equal(problems["split"], "train"))
    tokenizer, engine = load_tokenizer(checkpoint), NativeEngine.open(checkpoint)
    rollouts = sample_in_parts(
        engine,
        tokenizer,
        encode_problems(tokenizer, problems),
        params.samples,
        params.sampling,
        seed=stage.seed,
        stage=stage.name,
        progress=stage.progress,
    )
    decisions = decide(problems, rollouts, params.samples, params.keep.low, params.keep.high)
    kept = problems.filter(decisions["kept"])
    if not kept.num_rows:
        raise UserError(
            f"filter: none of {problems.num_rows} problems has a pass rate from {params.keep.low:g} to {params.keep.high:g} "
            "under data/sft; widen filter.keep in params.yaml, or train sft longer"
        )
    write(stage.output / "problems.parquet", kept, PROBLEM)
    write(stage.output / "decisions.parquet", decisions, DECISION)
    write(stage.output / "samples.parquet", rollout_table(rollouts), ROLLOUT)
    bars = histogram(decisions, params.samples)
    (stage.output / "histogram.json").write_text(json.dumps(bars, indent=1) + "\n")
    stage.log_rows("problems", problems.num_rows)
    stage.log_rows("kept", kept.num_rows)
    stage.log_rows("samples", len(rollouts))
    stage.write_metrics(
        {"problems": problems.num_rows, "kept": kept.num_rows, "pass_rate": pc.mean(decisions["pass_rate"]).as_py()}
    )


if __name__ == "__main__":
    main(compute)
