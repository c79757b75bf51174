"""Stage `reward`: a reward model from the SFT model's verified samples. data/sft + data/synthesize -> data/reward."""

from __future__ import annotations

from pydantic import Field

from pipelines.generation.settings import Sampling
from pipelines.training.settings import TrainingParams
from tasks.contract import main
from tasks.execution import Execution
from tasks.samples import verified_samples


class Params(TrainingParams):
    """Section `reward` of params.yaml."""

    problems: int = Field(ge=2, description="training problems to sample answers for, at the most")
    samples: int = Field(ge=2, description="answers per problem")
    sampling: Sampling
    pairs_per_problem: int = Field(ge=1, description="pairs of a right and a wrong answer per problem, at the most")
    heldout_share: float = Field(gt=0, lt=1, description="share of the problems whose pairs only measure accuracy")


def compute(stage: Execution) -> None:
    from pipelines.base.architectures import load_tokenizer, reward_model_from, save_checkpoint
    from pipelines.generation.rollouts import choose
    from pipelines.records import PREFERENCE, PROBLEM, ROLLOUT, read, write
    from pipelines.reward.pairs import make_pairs
    from pipelines.reward.train import pair_accuracy, pair_units, train_reward_model
    from pipelines.training.loop import history_table

    params: Params = stage.params
    checkpoint = stage.input("data/sft")
    tokenizer = load_tokenizer(checkpoint)
    problems = read(stage.input("data/synthesize") / "problems.parquet", PROBLEM)
    samples = verified_samples(stage, checkpoint, choose(problems, "train", params.problems, stage.seed))
    rollouts = samples.to_pylist()

    pairs = make_pairs(rollouts, params.samples, params.pairs_per_problem, params.heldout_share, stage.seed)
    tokens = {row["id"]: row["tokens"] for row in rollouts}
    units = {
        split: pair_units(
            [(tokens[p["chosen_id"]], tokens[p["rejected_id"]]) for p in pairs.to_pylist() if p["split"] == split]
        )
        for split in ("train", "heldout")
    }
    model = reward_model_from(checkpoint)
    history = train_reward_model(
        model,
        units["train"],
        params,
        pad_id=tokenizer.pad_token_id,
        seed=stage.seed,
        scratch=stage.scratch,
        report=stage.report,
    )
    accuracy = pair_accuracy(model, units["heldout"], tokenizer.pad_token_id)
    save_checkpoint(model, tokenizer, stage.output)
    write(stage.output / "samples.parquet", samples, ROLLOUT)
    write(stage.output / "pairs.parquet", pairs, PREFERENCE)
    history_table(history, stage.output / "history.parquet")
    stage.log_rows("samples", len(rollouts))
    stage.log_rows("pairs", pairs.num_rows)
    stage.write_metrics({"heldout_pair_accuracy": accuracy, "heldout_pairs": len(units["heldout"])})


if __name__ == "__main__":
    main(compute)
