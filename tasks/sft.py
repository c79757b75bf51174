"""Stage `sft`: cold start by supervised fine-tuning. data/base + data/synthesize -> data/sft (checkpoint, history)."""

from __future__ import annotations

from pydantic import Field

from pipelines.training.settings import TrainingParams
from tasks.contract import main
from tasks.execution import Execution


class Params(TrainingParams):
    """Section `sft` of params.yaml."""

    max_tokens: int = Field(ge=2, description="longest prompt plus completion; a longer demonstration is an error")


def compute(stage: Execution) -> None:
    from pipelines.base.architectures import load_model, load_tokenizer, save_checkpoint
    from pipelines.records import DEMONSTRATION, read
    from pipelines.sft.train import encode_demonstrations, fine_tune
    from pipelines.training.loop import history_table

    params: Params = stage.params
    base = stage.input("data/base")
    demonstrations = read(stage.input("data/synthesize") / "demonstrations.parquet", DEMONSTRATION)
    model, tokenizer = load_model(base), load_tokenizer(base)
    sequences = encode_demonstrations(tokenizer, demonstrations, params.max_tokens)
    stage.log_rows("demonstrations", len(sequences))
    history = fine_tune(
        model,
        sequences,
        params,
        pad_id=tokenizer.pad_token_id,
        seed=stage.seed,
        scratch=stage.scratch,
        report=stage.report,
    )
    save_checkpoint(model, tokenizer, stage.output)
    history_table(history, stage.output / "history.parquet")
    stage.write_metrics({"loss": history[-1]["loss/cross_entropy"]})


if __name__ == "__main__":
    main(compute)
