"""One optimiser step against numbers derived by hand, and against itself cut differently."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pipelines.files import sha256
from pipelines.training.batch import Sequence, epoch_order, indices_at, micro_batches
from pipelines.training.checkpoint import CheckpointStore, readable
from pipelines.training.components import BradleyTerry, Outputs, TokenComponent, cross_entropy, token_outputs
from pipelines.training.loop import optimise
from pipelines.training.settings import Compute, Optimiser, Training
from pipelines.training.trainer import Trainer, learning_rate

OPTIMISER = Optimiser(lr=0.01, schedule="constant", warmup_steps=0, weight_decay=0.1, clip_norm=1.0)
SETTINGS = Training(optimiser=OPTIMISER, compute=Compute(micro_tokens=4096), checkpoint_every=3)


def training(compute: Compute | None = None, **optimiser) -> Training:
    changes = {"compute": compute or SETTINGS.compute, "optimiser": OPTIMISER.model_copy(update=optimiser)}
    return SETTINGS.model_copy(update=changes)


CROSS_ENTROPY = TokenComponent("cross_entropy", 1.0, "supervised", cross_entropy)


def units(count: int = 8, seed: int = 0):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(rng.integers(3, 14))
        weights = (rng.random(length) < 0.6).astype(np.float32)
        weights[0], weights[-1] = 0.0, 1.0
        made.append((Sequence(rng.integers(2, 32, length), {"supervised": weights}),))
    return made


def gradients(model, batch, micro_tokens):
    trainer = Trainer(model, [CROSS_ENTROPY], training(compute=Compute(micro_tokens=micro_tokens)), 1, 0)
    trainer.update(batch)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def test_loss_is_the_mean_over_all_weighted_tokens_of_the_step(tiny_model):
    model, batch = tiny_model(), units()
    total, count = 0.0, 0.0
    for (sequence,) in batch:
        with torch.no_grad():
            logits = model.double()(torch.from_numpy(sequence.tokens)[None]).logits[0]
        logp = torch.log_softmax(logits, -1)
        for t in range(1, len(sequence.tokens)):
            total -= sequence.values["supervised"][t] * float(logp[t - 1, sequence.tokens[t]])
        count += sequence.values["supervised"].sum()
    metrics = Trainer(tiny_model(), [CROSS_ENTROPY], SETTINGS, 1, 0).update(batch)
    assert metrics["loss/cross_entropy"] == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize("micro_tokens", [16, 40, 200])
def test_gradient_does_not_depend_on_the_micro_batches(tiny_model, micro_tokens):
    whole = gradients(tiny_model(), units(), 4096)
    torch.testing.assert_close(gradients(tiny_model(), units(), micro_tokens), whole, atol=2e-7, rtol=1e-4)


def test_gradient_does_not_depend_on_the_order_of_rows(tiny_model):
    torch.testing.assert_close(
        gradients(tiny_model(), units()[::-1], 64), gradients(tiny_model(), units(), 64), atol=2e-7, rtol=1e-4
    )


def test_token_logprobs_are_aligned_with_their_tokens(tiny_model):
    model, pool = tiny_model(), units(3)
    (batch,) = micro_batches(pool, "padded", 4096, 0, torch.device("cpu"))
    outputs = token_outputs(model, batch)
    logits = model(batch.tokens_B_T).logits
    torch.testing.assert_close(outputs.logits_N_V, logits[batch.rows_N, batch.columns_N])
    seen = 0
    for row, index in enumerate(batch.units):
        tokens, scored = pool[index][0].tokens, pool[index][0].scored()
        for at in scored:
            assert int(batch.targets_N[seen]) == tokens[at]
            logp = torch.log_softmax(logits[row, at - 1], -1)[tokens[at]]
            assert float(outputs.logp_N[seen].detach()) == pytest.approx(float(logp.detach()), abs=1e-6)
            seen += 1
    assert seen == len(batch.targets_N)


def test_bradley_terry_by_hand():
    outputs = Outputs(scores_S=torch.tensor([2.0, 0.0, -1.0, 1.0]))
    loss = float(BradleyTerry().loss(outputs, None))
    assert loss == pytest.approx(math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2)), abs=1e-6)
    assert float(BradleyTerry().measure(outputs, None)["pair_accuracy"]) == 1
    assert BradleyTerry().denominator([(), ()]) == 2


def test_a_gradient_that_is_not_finite_changes_nothing(tiny_model):
    model = tiny_model()
    before = [parameter.clone() for parameter in model.parameters()]
    bad = TokenComponent("bad", 1.0, "supervised", lambda outputs, batch: outputs.logp_N * float("inf"))
    with pytest.raises(FloatingPointError, match="nothing was changed"):
        Trainer(model, [bad], SETTINGS, 1, 0).update(units())
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_the_gradient_is_clipped_to_the_norm(tiny_model):
    model = tiny_model()
    trainer = Trainer(model, [CROSS_ENTROPY], training(clip_norm=1e-3), 1, 0)
    assert trainer.update(units())["gradient_norm"] > 1e-3
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_weight_decay_leaves_vectors_alone(tiny_model):
    model = tiny_model()
    trainer = Trainer(model, [CROSS_ENTROPY], SETTINGS, 1, 0)
    decays = {id(p): group["weight_decay"] for group in trainer.optimiser.param_groups for p in group["params"]}
    assert all((decays[id(p)] > 0) == (p.ndim >= 2) for p in model.parameters())


def test_schedules():
    def rates(schedule):
        settings = OPTIMISER.model_copy(update={"schedule": schedule, "warmup_steps": 2})
        return [round(learning_rate(settings, update, 6), 6) for update in range(6)]

    assert rates("constant") == [0.005, 0.01, 0.01, 0.01, 0.01, 0.01]
    assert rates("linear") == [0.005, 0.01, 0.01, 0.0075, 0.005, 0.0025]
    assert rates("cosine") == [
        0.005,
        0.01,
        0.01,
        round(0.005 * (1 + 0.5**0.5), 6),
        0.005,
        round(0.005 * (1 - 0.5**0.5), 6),
    ]


def test_order_sees_every_item_once_an_epoch_and_depends_on_seed_and_epoch_only():
    seen = np.concatenate([indices_at(step, 3, 5, 7) for step in range(7)])  # 21 draws = three epochs of 7
    for epoch in range(3):
        assert sorted(seen[epoch * 7 : (epoch + 1) * 7]) == list(range(7))
        np.testing.assert_array_equal(seen[epoch * 7 : (epoch + 1) * 7], epoch_order(5, epoch, 7))
    assert not np.array_equal(epoch_order(5, 0, 7), epoch_order(6, 0, 7))


def weights(model) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def run(model, directory, steps, stop_after=None):
    """Train to `steps`; `stop_after` ends it between two steps the way a kill would."""

    def report(done, total, metrics):
        if done == stop_after:
            raise KeyboardInterrupt

    trainer = Trainer(model, [CROSS_ENTROPY], training(schedule="cosine"), steps, 0)
    pool = units(10)
    units_at = lambda step: ([[pool[i] for i in indices_at(step, 4, 0, 10)]], {"step": float(step)})  # noqa: E731
    return optimise(trainer, steps, units_at, CheckpointStore(directory), 3, report)


@pytest.mark.parametrize("stop_after", [1, 3, 4, 6, 8])
def test_a_stopped_run_goes_on_to_the_same_bytes(tiny_model, tmp_path, stop_after):
    whole = tiny_model()
    history = run(whole, tmp_path / "whole", 9)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_model(), tmp_path / "stopped", 9, stop_after)
    resumed = tiny_model(
        99
    )  # other weights: all must come from the checkpoint, or, before the first one, from the caller
    if stop_after <= 3:
        resumed = tiny_model()
    assert run(resumed, tmp_path / "stopped", 9) == history
    assert weights(resumed) == weights(whole)


def test_a_damaged_checkpoint_is_passed_over(tiny_model, tmp_path):
    whole = tiny_model()
    history = run(whole, tmp_path / "whole", 9)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_model(), tmp_path / "stopped", 9, 8)
    newest = tmp_path / "stopped" / "tick-00000006"
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "model.safetensors").write_bytes(content)
    assert not readable(newest)
    assert CheckpointStore(tmp_path / "stopped").newest_tick() == 3
    resumed = tiny_model(99)
    assert run(resumed, tmp_path / "stopped", 9) == history
    assert weights(resumed) == weights(whole)


@pytest.mark.parametrize("damage", ["null", "[1]", "{}", '{"ticks": 6, "files": {}}', "renamed", "empty", "a file"])
def test_what_is_no_checkpoint_is_passed_over_and_removed(tiny_model, tmp_path, damage):
    whole = tiny_model()
    history = run(whole, tmp_path / "whole", 9)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_model(), tmp_path / "stopped", 9, 8)
    newest, later = (tmp_path / "stopped" / f"tick-{tick:08d}" for tick in (6, 8))
    if damage == "renamed":
        newest.rename(later)
    elif damage == "empty":
        later.mkdir()
    elif damage == "a file":
        later.write_text("")
    else:
        (newest / "manifest.json").write_text(damage)
    (tmp_path / "stopped" / ".writing-something").write_text("")
    store = CheckpointStore(tmp_path / "stopped")
    assert store.newest_tick() == (6 if damage in ("empty", "a file") else 3)
    assert not later.exists() and not (tmp_path / "stopped" / ".writing-something").exists()
    resumed = tiny_model(99)
    assert run(resumed, tmp_path / "stopped", 9) == history
    assert weights(resumed) == weights(whole)
    assert sorted(path.name for path in (tmp_path / "stopped").iterdir()) == ["tick-00000006", "tick-00000009"]


def test_a_checkpoint_cannot_be_read_without_the_files_that_belong_to_it(tiny_model, tmp_path):
    beside = tmp_path / "rows.parquet"
    beside.write_text("rows")

    def written(tick: int) -> dict:
        return {beside: sha256(beside)}

    trainer = Trainer(tiny_model(), [CROSS_ENTROPY], SETTINGS, 2, 0)
    store = CheckpointStore(tmp_path / "checkpoints")
    optimise(trainer, 2, lambda step: ([units(3)], {}), store, 1, lambda *_: None, on_checkpoint=written)
    newest = tmp_path / "checkpoints" / "tick-00000002"
    assert readable(newest)
    beside.write_text("row")
    assert not readable(newest)
    assert CheckpointStore(tmp_path / "checkpoints").newest() is None


def test_old_checkpoints_go_and_a_step_without_updates_is_recorded(tiny_model, tmp_path):
    trainer = Trainer(tiny_model(), [CROSS_ENTROPY], SETTINGS, 6, 0)
    history = optimise(trainer, 6, lambda step: ([], {"reward": 1.0}), CheckpointStore(tmp_path), 1, print)
    assert history == [{"reward": 1.0}] * 6
    assert trainer.updates == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tick-00000005", "tick-00000006"]
