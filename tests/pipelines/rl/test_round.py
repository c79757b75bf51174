"""A whole round on a tiny model: what is kept and trained on, and that a stopped round goes on to the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.generation.native import NativeEngine
from pipelines.generation.rollouts import EncodedProblems
from pipelines.generation.settings import FullSupportSampling
from pipelines.rl.round import run_round
from pipelines.rl.settings import Advantage, PolicyLoss, RewardWeights, RoundParams
from pipelines.training.settings import Compute, Optimiser

SETTINGS = {
    "steps": 6,
    "problems_per_step": 4,
    "group_size": 4,
    "updates_per_step": 2,
    "sampling": FullSupportSampling(temperature=1.0, max_new_tokens=4),
    "loss": PolicyLoss(clip_low=0.2, clip_high=0.28, kl=0.0),
    "advantage": Advantage(scale="none"),
    "reward": RewardWeights(verifier=1.0, reward_model=0.0),
    "optimiser": Optimiser(lr=0.01, schedule="constant", warmup_steps=0, weight_decay=0.0, clip_norm=1.0),
    "compute": Compute(micro_tokens=256),
    "checkpoint_every": 2,
}
SURROUNDINGS = {"reward_model": None, "reference": None, "seed": 0, "stage": "rl@1"}


class Letters:
    """A tokenizer of 32 letters: enough to decode completions of the tiny model."""

    pad_token_id, eos_token_id, pad_token, eos_token, chat_template = 0, 1, "_", ".", None

    def batch_decode(self, rows, skip_special_tokens):
        return ["".join("_.abcdefghijklmnopqrstuvwxyzABCD"[token] for token in row) for row in rows]


def problems() -> EncodedProblems:
    """The prompt is a letter and so is the answer; a random model is right about once in thirty."""
    rows, tokens = [], []
    for index in range(8):
        rows.append(
            {
                "id": f"p{index}",
                "family": "copy",
                "level": 1,
                "answer": "a",
                "verifier": "first",
                "verifier_args": "{}",
            }
        )
        tokens.append([2 + index, 3])
    return EncodedProblems(rows, tokens)


@pytest.fixture(autouse=True)
def first_letter_decides(monkeypatch):
    from pipelines.environments.verifiers import Verdict

    def verify_batch(texts, *columns):
        return [Verdict(text[:1] < "n", float(text[:1] < "n"), "first letter") for text in texts]

    monkeypatch.setattr("pipelines.generation.rollouts.verify_batch", verify_batch)


def silent(done, total, metrics):
    pass


def weights(model) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def play(model, scratch, report=silent, **changes):
    settings = {name: changes.get(name, value) for name, value in SETTINGS.items()}
    around = SURROUNDINGS | {name: value for name, value in changes.items() if name not in SETTINGS}
    engine = NativeEngine(model, Letters())
    params = RoundParams(**settings)
    return run_round(model, Letters(), engine, problems(), params, scratch=scratch, report=report, **around)


def test_every_rollout_is_kept_and_only_mixed_groups_are_trained_on(tiny_model, tmp_path):
    history, table = play(tiny_model(), tmp_path)
    rows = table.to_pylist()
    assert len(rows) == 6 * 4 * 4 and len({row["id"] for row in rows}) == len(rows)
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    assert len(groups) == 24
    for group in groups.values():
        mixed = 0 < sum(row["correct"] for row in group) < 4
        assert all(bool(row["trained_steps"]) == mixed for row in group)
        assert all((row["untrained_reason"] == "") == mixed for row in group)
        assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-6)
    versions = [row["policy_version"] for row in rows]
    assert versions[0] == 0 and versions == sorted(versions)
    assert max(step for row in rows for step in row["trained_steps"]) <= 12
    assert all(0 <= metrics["accuracy"] <= 1 for metrics in history)


def test_a_problem_drawn_twice_in_a_step_gives_two_groups_of_different_samples(tiny_model, tmp_path):
    _, table = play(tiny_model(), tmp_path, problems_per_step=24)  # of 8 problems
    rows = table.to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({row["group"] for row in rows}) == 6 * 24
    first = [row for row in rows if row["step"] == 1 and row["problem_id"] == "p0"]
    assert sorted(row["sample"] for row in first) == list(range(12))
    assert len({tuple(row["logprobs"]) for row in first}) > 6


def test_the_policy_learns(tiny_model, tmp_path):
    history, _ = play(tiny_model(), tmp_path, steps=40)
    first, last = (np.mean([metrics["accuracy"] for metrics in part]) for part in (history[:5], history[-5:]))
    assert last > first + 0.2


def test_the_first_update_of_a_batch_is_on_policy(tiny_model, tmp_path):
    history, _ = play(tiny_model(), tmp_path, updates_per_step=1)
    assert all(metrics["behaviour_kl"] < 1e-8 for metrics in history if "behaviour_kl" in metrics)
    assert all(metrics["clip_share"] == 0 for metrics in history if "clip_share" in metrics)


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5])
def test_a_stopped_round_goes_on_to_the_same_bytes(tiny_model, tmp_path, stop_after):
    whole = tiny_model()
    history, rollouts = play(whole, tmp_path / "whole")

    def stop(done, total, metrics):
        if done == stop_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(tiny_model(), tmp_path / "stopped", stop)
    resumed = tiny_model()
    again, table = play(resumed, tmp_path / "stopped")
    assert weights(resumed) == weights(whole)
    assert again == history
    assert table.equals(rollouts)


@pytest.mark.parametrize("damage", ["cut", "gone", "a stranger beside"])
@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_a_damaged_shard_of_rollouts_takes_its_checkpoints_along(tiny_model, tmp_path, damage, which):
    whole = tiny_model()
    _, expected = play(whole, tmp_path / "whole")

    def stop(done, total, metrics):
        if done == 5:
            raise KeyboardInterrupt

    scratch = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        play(tiny_model(), scratch, stop)
    shards = sorted((scratch / "rollouts").iterdir())
    assert len(shards) > 1
    shard = shards[0 if which == "oldest" else -1]
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-9])
    elif damage == "gone":
        shard.unlink()
    else:
        (scratch / "rollouts" / "notes.parquet").write_text("mine")
    resumed = tiny_model()
    assert play(resumed, scratch)[1].equals(expected)
    assert weights(resumed) == weights(whole)


def changed(tiny_model, tmp_path, name, **changes) -> bool:
    plain, other = tiny_model(), tiny_model()
    play(plain, tmp_path / "plain")
    play(other, tmp_path / name, **changes)
    return weights(plain) != weights(other)


def test_every_switch_changes_the_result(tiny_model, tmp_path):
    class Scorer:
        def scores(self, sequences):
            return np.array([float(sum(tokens) % 7) - 3 for tokens in sequences])

    switches = {
        "kl": {"loss": PolicyLoss(clip_low=0.2, clip_high=0.28, kl=0.5), "reference": tiny_model(3)},
        "clip": {"loss": PolicyLoss(clip_low=0.0, clip_high=0.0, kl=0.0)},
        "scale": {"advantage": Advantage(scale="group_std")},
        "updates": {"updates_per_step": 1},
        "model": {"reward": RewardWeights(verifier=1.0, reward_model=1.0), "reward_model": Scorer()},
        "temperature": {"sampling": FullSupportSampling(temperature=0.7, max_new_tokens=4)},
        "seed": {"seed": 1},
        "stage": {"stage": "rl@2"},
        "group_size": {"group_size": 8},
    }
    assert [name for name, changes in switches.items() if not changed(tiny_model, tmp_path, name, **changes)] == []


def test_a_streak_without_contrast_is_said(tiny_model, tmp_path, monkeypatch):
    from pipelines.environments.verifiers import Verdict

    monkeypatch.setattr(
        "pipelines.generation.rollouts.verify_batch",
        lambda texts, *columns: [Verdict(False, 0.0, "wrong")] * len(texts),
    )
    said: list[str] = []
    model = tiny_model()
    before = weights(model)
    play(model, tmp_path, steps=10, warn=said.append)
    assert said == ["rl@1: no group of the last 10 steps held both right and wrong answers: nothing was learned"]
    assert weights(model) == before
