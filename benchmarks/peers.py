"""Generation, RL and SFT steps against the peers, on the same work: `python -m benchmarks.peers NAME` prints JSON.

Each comparison runs in one process, ours and theirs by turns; the ratio is the median of the ratios of the turns. TRL
is found on PYTHONPATH, vLLM in the environment that `make test-vllm` makes: neither is a dependency of the project.

The models are Qwen3 with random weights, 512 tokens and a bias on the end token that makes completions of 24 tokens on
average, 64 at the most.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks import TURNS

VOCABULARY, PAD, END, LONGEST = 512, 0, 1, 64
SIZES = {
    "0.5M": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32, "mlp": 384},
    "5M": {"hidden_size": 320, "num_hidden_layers": 5, "num_attention_heads": 8, "head_dim": 40, "mlp": 960},
}
TOKENIZER = SimpleNamespace(eos_token_id=END, pad_token_id=PAD)


def model(size: str) -> Any:
    from pipelines.base.checkpoint import initialise

    shape = dict(SIZES[size])
    config = {
        "vocab_size": VOCABULARY,
        "intermediate_size": shape.pop("mlp"),
        "num_key_value_heads": shape["num_attention_heads"] // 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
        "eos_token_id": END,
        "bos_token_id": None,
        **shape,
    }
    made = initialise(config, 0)
    made.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))
    with torch.no_grad():
        made.lm_head.bias[END] = math.log(VOCABULARY / 24.5)
        made.lm_head.bias[PAD] = -30.0
    return made


def prompts(count: int) -> list[list[int]]:
    """Token ids, 8 to 40 of them."""
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCABULARY, int(length)).tolist() for length in rng.integers(8, 41, count)]


def by_turns(ours: Callable[[int], float], theirs: Callable[[int], float]) -> dict[str, float]:
    """Both are functions from a turn to a rate; the first turn of each only warms up."""
    ours(0), theirs(0)
    rates = [(ours(turn), theirs(turn)) for turn in range(1, TURNS + 1)]
    ratios = [one / other for one, other in rates]
    return {
        "ours": statistics.median(one for one, _ in rates),
        "theirs": statistics.median(other for _, other in rates),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }


def timed(work: Callable[[], int]) -> float:
    """Units of work a second."""
    began = time.perf_counter()
    done = work()
    return done / (time.perf_counter() - began)


# --- generation -----------------------------------------------------------------------------------------------


def native(policy: Any, asked: list[list[int]], samples: int, ends: list[int] | None = None) -> Callable[[int], float]:
    from pipelines.generation.engine import Prompt
    from pipelines.generation.native import NativeEngine
    from pipelines.generation.settings import Sampling

    engine = NativeEngine(policy, TOKENIZER)
    sampling = Sampling(temperature=1.0, max_new_tokens=LONGEST, stop_ids=ends or [])

    def rate(turn: int) -> float:
        keys = np.random.default_rng(turn).integers(0, 2**63, (len(asked), samples)).tolist()
        wanted = [Prompt(tokens, tuple(row)) for tokens, row in zip(asked, keys, strict=True)]
        return timed(lambda: sum(map(len, engine.generate(wanted, sampling).tokens)))

    return rate


def transformers_generate(policy: Any, asked: list[list[int]], samples: int) -> Callable[[int], float]:
    from transformers import GenerationConfig

    width = max(map(len, asked))
    tokens_P_T = torch.tensor([[PAD] * (width - len(tokens)) + tokens for tokens in asked])
    mask_P_T = (tokens_P_T != PAD).long()
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=LONGEST,
        num_return_sequences=samples,
        eos_token_id=END,
        pad_token_id=PAD,
    )

    def rate(turn: int) -> float:
        torch.manual_seed(turn)
        policy.eval()
        return timed(
            lambda: int(
                (policy.generate(tokens_P_T, attention_mask=mask_P_T, generation_config=config)[:, width:] != PAD).sum()
            )
        )

    return rate


def generation() -> dict[str, Any]:
    found = {}
    for size in SIZES:
        policy = model(size)
        found[f"256 prompts, {size}"] = by_turns(
            native(policy, prompts(256), 1), transformers_generate(policy, prompts(256), 1)
        )
    policy = model("0.5M")
    found["32 prompts x 8, 0.5M"] = by_turns(
        native(policy, prompts(32), 8), transformers_generate(policy, prompts(32), 8)
    )
    return found


def vllm() -> dict[str, Any]:
    """With 20 end tokens instead of a bias, which vLLM's model has not; heads of 64, the least it takes on the CPU."""
    import os

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams, TokensPrompt

    SIZES["0.5M"] |= {"num_attention_heads": 2, "head_dim": 64}
    policy = model("0.5M")
    policy.lm_head.bias = None
    ends = list(range(1, 21))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder)
        llm = LLM(
            folder, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, max_num_seqs=256
        )
        for name, asked, samples in (("256 prompts", prompts(256), 1), ("32 prompts x 8", prompts(32), 8)):
            wanted = [TokensPrompt(prompt_token_ids=tokens) for tokens in asked]

            def theirs(turn: int, wanted=wanted, samples=samples) -> float:
                params = SamplingParams(  # no seed: on the CPU it does not go with prompts read in parts
                    n=samples, temperature=1.0, max_tokens=LONGEST, stop_token_ids=ends, detokenize=False
                )
                return timed(
                    lambda: sum(
                        len(one.token_ids)
                        for request in llm.generate(wanted, params, use_tqdm=False)
                        for one in request.outputs
                    )
                )

            found[f"{name}, 0.5M"] = by_turns(native(policy, asked, samples, ends), theirs)
    return found


# --- training -------------------------------------------------------------------------------------------------


_TRL = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "gradient_checkpointing": False,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1.0,
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1000,
}


def _clock() -> Any:
    """A callback of TRL's trainers with the moment at which each step ended."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.moments: list[float] = []

        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            self.moments.append(time.perf_counter())

    return Clock()


def tokenizer() -> Any:
    """A word-level tokenizer whose tokens are numbers, for TRL."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<end>": END} | {str(token): token for token in range(2, VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def grpo() -> dict[str, Any]:
    """Completion tokens a second of whole steps: sampling, rewards, update. Every group has rewards 0 and 1."""
    return {"32 x 8 samples, 0.5M": by_turns(_grpo_ours(), _grpo_trl())}


def _grpo_ours() -> Callable[[int], float]:
    from pipelines.environments.verifiers import Verdict
    from pipelines.generation import rollouts
    from pipelines.generation.native import NativeEngine
    from pipelines.generation.settings import FullSupportSampling
    from pipelines.rl.round import run_round
    from pipelines.rl.settings import Advantage, PolicyLoss, RewardWeights, RoundParams
    from pipelines.training.settings import Compute, Optimiser

    def alternate(texts, *columns):
        return [Verdict(index % 2 == 0, float(index % 2 == 0), "") for index in range(len(texts))]

    rollouts.verify_batch = alternate
    reads = tokenizer()
    rows = [
        {"id": str(n), "family": "f", "level": 1, "answer": "", "verifier": "exact", "verifier_args": "{}"}
        for n in range(32)
    ]
    problems = rollouts.EncodedProblems(rows, prompts(32))
    steps = 2
    params = RoundParams(
        steps=steps,
        problems_per_step=32,
        group_size=8,
        updates_per_step=1,
        sampling=FullSupportSampling(temperature=1.0, max_new_tokens=LONGEST),
        loss=PolicyLoss(clip_low=0.2, clip_high=0.2, kl=0.0),
        advantage=Advantage(scale="group_std"),
        reward=RewardWeights(verifier=1.0, reward_model=0.0),
        optimiser=Optimiser(lr=1e-6, schedule="constant", warmup_steps=0, weight_decay=0.0, clip_norm=1.0),
        compute=Compute(micro_tokens=1536, layout="shared"),
        checkpoint_every=1000,
    )

    def rate(turn: int) -> float:
        policy = model("0.5M")
        moments, lengths = [time.perf_counter()], []

        def report(done: int, total: int, metrics: dict[str, float]) -> None:
            moments.append(time.perf_counter())
            lengths.append(256 * metrics["length"])

        with tempfile.TemporaryDirectory() as folder:
            run_round(
                policy,
                reads,
                NativeEngine(policy, reads),
                problems,
                params,
                reward_model=None,
                reference=None,
                seed=turn,
                stage="rl@1",
                scratch=Path(folder),
                report=report,
            )
        return lengths[1] / (moments[2] - moments[1])  # the first step warms up

    return rate


def _grpo_trl() -> Callable[[int], float]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    data = Dataset.from_dict({"prompt": [" ".join(map(str, tokens)) for tokens in prompts(32)]})
    reads = tokenizer()

    def run(turn: int, micro_batch: int) -> float:
        clock, lengths = _clock(), []

        def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
            lengths.append(sum(map(len, completion_ids)))
            return [float(index % 2 == 0) for index in range(len(completion_ids))]

        with tempfile.TemporaryDirectory() as folder:
            config = GRPOConfig(
                output_dir=folder,
                seed=turn,
                **_TRL,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=256 // micro_batch,
                num_generations=8,
                max_completion_length=LONGEST,
                max_steps=2,
                learning_rate=1e-6,
                beta=0.0,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
            trainer = GRPOTrainer(
                model=model("0.5M"),
                reward_funcs=reward,
                args=config,
                train_dataset=data,
                processing_class=reads,
                callbacks=[clock],
            )
            trainer.train()
        return lengths[1] / (clock.moments[1] - clock.moments[0])

    better = max((64, 256), key=lambda micro_batch: run(0, micro_batch))
    return lambda turn: run(turn, better)


def sft() -> dict[str, Any]:
    """Trained tokens a second, padding not counted, on rows of 8 to 104 tokens.

    TRL packs in two ways: "bfd" keeps rows whole and apart, as the layout `packed` does; "wrapped" cuts them and lets
    them see one another.
    """
    settings = ((128, 8), (128, 32), (256, 4), (256, 16))
    found = {}
    for strategy in ("bfd", "wrapped"):
        trl = _sft_trl(strategy)
        better = max(settings, key=lambda setting, trl=trl: trl(0, *setting))
        theirs = lambda turn, trl=trl, better=better: trl(turn, *better)  # noqa: E731
        found[f"rows of 8 to 104 tokens, {strategy}, 0.5M"] = by_turns(_sft_ours(), theirs)
    return found


def _rows(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 41, count) + np.minimum(LONGEST, rng.geometric(1 / 24.5, count))
    return [rng.integers(2, VOCABULARY, int(length)).tolist() for length in lengths]


_BATCH, _SFT_STEPS = 128, 4


def _supervised(
    steps: int,
    every: int,
    seed: int,
    folder: str,
    report: Callable[[int, int, dict[str, float]], None],
) -> Callable[[], Any]:
    """Supervised training that is ready to begin."""
    from pipelines.training.batch import Sequence
    from pipelines.training.checkpoint import CheckpointStore
    from pipelines.training.components import TokenComponent, cross_entropy
    from pipelines.training.loop import epochs, optimise
    from pipelines.training.settings import Compute, Optimiser, Training
    from pipelines.training.trainer import Trainer

    rows = _rows(_BATCH * _SFT_STEPS)
    units = [(Sequence(np.array(row), {"supervised": np.ones(len(row), np.float32)}),) for row in rows]
    params = Training(
        optimiser=Optimiser(lr=1e-5, schedule="constant", warmup_steps=0, weight_decay=0.0, clip_norm=1.0),
        compute=Compute(micro_tokens=3072, layout="packed"),
        checkpoint_every=every,
    )
    component = TokenComponent("cross_entropy", 1.0, "supervised", cross_entropy)
    trainer = Trainer(model("0.5M"), [component], params, steps, PAD)
    store = CheckpointStore(Path(folder))
    return lambda: optimise(trainer, steps, epochs(units, _BATCH, seed), store, every, report)


def _sft_ours() -> Callable[[int], float]:
    tokens = sum(map(len, _rows(_BATCH * _SFT_STEPS)))

    def rate(turn: int) -> float:
        moments: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            _supervised(_SFT_STEPS, 1000, turn, folder, lambda *_: moments.append(time.perf_counter()))()
        return tokens * (_SFT_STEPS - 1) / _SFT_STEPS / (moments[-1] - moments[0])  # the first step warms up

    return rate


def _sft_trl(strategy: str) -> Callable[..., float]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = _rows(_BATCH * _SFT_STEPS)

    def run(turn: int, length: int, micro_batch: int) -> float:
        clock = _clock()
        with tempfile.TemporaryDirectory() as folder:
            config = SFTConfig(
                output_dir=folder,
                seed=turn,
                **_TRL,
                packing=True,
                packing_strategy=strategy,
                max_length=length,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=max(1, sum(map(len, rows)) // (_SFT_STEPS * length * micro_batch)),
                num_train_epochs=1,
                learning_rate=1e-5,
            )
            trainer = SFTTrainer(
                model=model("0.5M"),
                args=config,
                train_dataset=Dataset.from_dict({"input_ids": rows}),
                processing_class=tokenizer(),
                callbacks=[clock],
            )
            trainer.train()
        packed = trainer.train_dataset["input_ids"]
        of_a_step = micro_batch * config.gradient_accumulation_steps
        whole = clock.moments[: len(packed) // of_a_step]
        return sum(map(len, packed)) / len(packed) * of_a_step * (len(whole) - 1) / (whole[-1] - whole[0])

    return run


def checkpoints() -> dict[str, Any]:
    """Share of a run that goes into four checkpoints, and into reading one back after a stop half-way."""
    from pipelines.training.checkpoint import CheckpointStore

    steps, spent = 40, []

    class Stopped(Exception):
        pass

    def stop(done: int, total: int, metrics: dict[str, float]) -> None:
        if done > steps // 2:  # inside the step after the second checkpoint
            raise Stopped

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                spent.append(time.perf_counter() - began)

        return call

    for name in ("save", "resume"):
        setattr(CheckpointStore, name, noted(getattr(CheckpointStore, name)))

    def share(turn: int) -> float:
        seconds = 0.0
        spent.clear()
        with tempfile.TemporaryDirectory() as folder:
            for report in (stop, lambda *_: None):
                train = _supervised(steps, steps // 4, turn, folder, report)
                began = time.perf_counter()
                with suppress(Stopped):
                    train()
                seconds += time.perf_counter() - began
        return sum(spent) / (seconds - sum(spent))

    shares = [share(turn) for turn in range(TURNS + 1)][1:]
    return {"share": statistics.median(shares), "lowest": min(shares), "highest": max(shares)}


COMPARISONS = {"generation": generation, "vllm": vllm, "grpo": grpo, "sft": sft, "checkpoints": checkpoints}

if __name__ == "__main__":
    torch.set_num_threads(2)
    print(json.dumps(COMPARISONS[sys.argv[1]]()))
