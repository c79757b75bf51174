"""What `ratchet run` does with stages that succeed, fail, hang, are killed or find the ground moved."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import yaml
from toy_project import STAGES, Toy, alive, wait_for


def test_everything_is_built_once_and_then_nothing_is_done(toy: Toy) -> None:
    toy.ratchet("run")
    assert toy.states() == dict.fromkeys(STAGES, "fresh")
    assert toy.total_calls() == {**dict.fromkeys([s.split("@")[0] for s in STAGES], 1), "rl": 2}
    again = toy.ratchet("run")
    assert again.stdout.strip() == "Nothing to do: 9 stages are up to date."
    assert toy.calls("base") == 1
    assert not list((toy.root / ".ratchet" / "running").iterdir())


def test_a_parameter_reruns_its_stage_and_what_is_below_and_going_back_restores(built: Toy) -> None:
    before = built.total_calls()
    built.set("rl.lr", 3e-4)
    built.ratchet("run")
    after = built.total_calls()
    # rl.lr is not written into the toy output, so what is below rl comes out equal and is not run
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {"rl": 2}
    built.set("rl.value", 5)
    built.ratchet("run")
    changed = built.total_calls()
    assert {n for n in changed if changed[n] != after[n]} == {"rl", "distill", "evaluate"}
    built.set("rl.value", 1)
    back = built.ratchet("run")
    assert built.total_calls() == changed
    assert "evaluate: restored from cache" in back.stdout
    assert built.states() == dict.fromkeys(STAGES, "fresh")


def test_stages_without_an_edge_between_them_run_at_the_same_time(toy: Toy) -> None:
    started = time.monotonic()
    toy.ratchet("run", "base", "synthesize", base={"sleep": 4}, synthesize={"sleep": 4})
    assert time.monotonic() - started < 8
    calls = [float((toy.root / f"calls.{name}").read_text()) for name in ("base", "synthesize")]
    assert abs(calls[0] - calls[1]) < 4


def test_a_stage_above_that_is_stale_is_refused_unless_asked_for(built: Toy) -> None:
    built.set("sft.value", 2)
    refused = built.ratchet("run", "rl@1", check=2)
    assert "sft is stale (parameter sft.value 1 -> 2)" in refused.stderr
    assert "ratchet run rl@1 --upstream" in refused.stderr
    assert built.calls("sft") == 1
    built.ratchet("run", "rl@1", "--upstream")
    assert built.calls("sft") == 2
    states = built.states()
    assert states["rl@1"] == "fresh"
    assert states["rl@2"] == "stale"


def test_force_reruns_a_fresh_stage_and_drops_its_scratch(built: Toy) -> None:
    scratch = built.root / ".ratchet" / "scratch" / "reward" / "0123"
    scratch.mkdir(parents=True)
    built.ratchet("run", "reward")
    assert built.calls("reward") == 1 and scratch.exists()
    built.ratchet("run", "reward", "--force")
    assert built.calls("reward") == 2 and not scratch.exists()
    assert built.states() == dict.fromkeys(STAGES, "fresh")


def test_a_forced_rerun_that_did_not_finish_goes_on_with_the_next_run(built: Toy) -> None:
    lock = (built.root / "dvc.lock").read_bytes()
    built.ratchet("run", "reward", "--force", check=1, reward={"die": True})
    assert built.reasons("reward") == ["a forced rerun of it did not finish"]
    scratch = built.root / ".ratchet" / "scratch" / "reward" / "0123"
    scratch.mkdir(parents=True)
    resumed = built.ratchet("run", check=1, reward={"die": True})
    assert "reward: started" in resumed.stdout and scratch.exists()
    built.ratchet("run")
    assert built.calls("reward") == 4 and not scratch.exists()
    assert built.states() == dict.fromkeys(STAGES, "fresh")
    assert (built.root / "dvc.lock").read_bytes() == lock


def test_downstream_runs_what_became_stale_below(built: Toy) -> None:
    built.set("reward.value", 2)
    built.ratchet("run", "reward", "--downstream")
    assert built.states() == dict.fromkeys(STAGES, "fresh")
    assert built.calls("filter") == 1


def test_a_failing_stage_is_named_leaves_nothing_and_gives_the_old_output_back(built: Toy) -> None:
    lock = (built.root / "dvc.lock").read_bytes()
    old = (built.root / "data/sft/value.json").read_bytes()
    built.set("sft.value", 2)
    built.set("synthesize.value", 2)
    failed = built.ratchet("run", check=1, sft={"exit": 3}, synthesize={"exit": 3})
    assert "stage synthesize failed" in failed.stderr
    assert "the reason for it" in failed.stderr
    assert "not started because of that: sft, filter" in failed.stderr
    assert (built.root / "dvc.lock").read_bytes() == lock
    built.set("synthesize.value", 1)
    failed = built.ratchet("run", check=1, sft={"exit": 3})
    assert "Brought back data/sft of the last good run" in failed.stderr
    assert (built.root / "data/sft/value.json").read_bytes() == old
    assert not (built.root / "data/sft/half").exists()
    assert (built.root / "dvc.lock").read_bytes() == lock
    assert built.reasons("sft") == ["parameter sft.value 1 -> 2"]


def test_exit_status_2_of_a_stage_is_a_mistake_of_the_user(toy: Toy) -> None:
    failed = toy.ratchet("run", "base", check=2, base={"exit": 2})
    assert "Traceback" not in failed.stderr
    assert "the reason for it" in failed.stderr


def test_other_stages_finish_when_one_fails(toy: Toy) -> None:
    failed = toy.ratchet("run", check=1, synthesize={"exit": 1}, base={"sleep": 3})
    assert "base: done" in failed.stdout
    states = toy.states()
    assert states["base"] == "fresh" and states["synthesize"] == "missing"


def test_a_killed_stage_and_a_full_disk_are_said_in_words(toy: Toy) -> None:
    killed = toy.ratchet("run", "base", check=1, base={"die": True})
    assert "killed (signal 9)" in killed.stderr
    full = toy.ratchet("run", "base", check=1, base={"print": "OSError: [Errno 28] No space left", "exit": 1})
    assert "the disk is full" in full.stderr


def test_ctrl_c_ends_a_stubborn_stage_and_its_grandchild_within_three_seconds(
    toy: Toy, ended: list[subprocess.Popen[str]]
) -> None:
    process = toy.start("run", "base", base={"stubborn": True, "sleep": 120})
    ended.append(process)
    wait_for(lambda: (toy.root / "grandchild.pid").exists() and (toy.root / "grandchild.pid").read_text() != "")
    child = int((toy.root / "child.pid").read_text())
    grandchild = int((toy.root / "grandchild.pid").read_text())
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert time.monotonic() - pressed < 3.0
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert not alive(child) and not alive(grandchild)
    toy.ratchet("run", "base")
    assert toy.states()["base"] == "fresh"


def test_sigterm_ends_the_stages_too(toy: Toy, ended: list[subprocess.Popen[str]]) -> None:
    process = toy.start("run", "base", base={"stubborn": True, "sleep": 120})
    ended.append(process)
    wait_for(lambda: (toy.root / "child.pid").exists() and (toy.root / "child.pid").read_text() != "")
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert not alive(int((toy.root / "child.pid").read_text()))


def test_after_kill_9_of_the_run_the_next_one_ends_what_is_left(toy: Toy, ended: list[subprocess.Popen[str]]) -> None:
    process = toy.start("run", "base", base={"stubborn": True, "sleep": 120})
    ended.append(process)
    wait_for(lambda: (toy.root / "child.pid").exists() and (toy.root / "child.pid").read_text() != "")
    child = int((toy.root / "child.pid").read_text())
    process.kill()
    process.communicate(timeout=20)
    assert alive(child)
    done = toy.ratchet("run", "base")
    assert "base was still running from an interrupted run" in done.stdout
    assert not alive(child)
    assert toy.states()["base"] == "fresh"


def test_dvc_s_table_of_readers_and_writers_cannot_lock_a_project_for_good(
    toy: Toy, ended: list[subprocess.Popen[str]]
) -> None:
    sleeping = subprocess.Popen(["sleep", "100"], text=True)
    ended.append(sleeping)
    zombie = subprocess.Popen(["true"], text=True)
    wait_for(lambda: not alive(zombie.pid))
    table = toy.root / ".dvc/tmp/rwlock"
    for number, pid in enumerate((sleeping.pid, zombie.pid)):
        info = {"pid": pid, "cmd": "dvc repro"}
        out = str(toy.root / "data/base")
        table.write_text(json.dumps({"write": {out: info}, "read": {out: [info]}}))
        toy.ratchet("run", "base", "--force")
        assert toy.calls("base") == number + 1
    table.write_text("")
    toy.ratchet("run", "base", "--force")
    assert toy.calls("base") == 3
    zombie.wait()


def test_the_reason_why_dvc_refuses_is_passed_on(toy: Toy) -> None:
    dvc = "import time; time.sleep(60)  # dvc"
    process = subprocess.Popen([sys.executable, "-c", dvc])
    info = {"pid": process.pid, "cmd": "dvc repro base"}
    (toy.root / ".dvc/tmp/rwlock").write_text(json.dumps({"write": {str(toy.root / "data/base"): info}}))
    try:
        failed = toy.ratchet("run", "base", check=1)
    finally:
        process.kill()
        process.wait()
    assert "is busy, it is being blocked by" in failed.stderr
    assert toy.calls("base") == 0


def test_when_dvc_is_killed_its_stage_is_ended_too(toy: Toy, ended: list[subprocess.Popen[str]]) -> None:
    process = toy.start("run", "base", base={"stubborn": True, "sleep": 120})
    ended.append(process)
    wait_for(lambda: (toy.root / "child.pid").exists() and (toy.root / "child.pid").read_text() != "")
    os.kill(json.loads((toy.root / ".ratchet/running/base.json").read_text())["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "killed (signal 9)" in output
    assert not alive(int((toy.root / "child.pid").read_text()))
    toy.ratchet("run", "base")


def test_what_dvc_recorded_unwatched_is_taken_back_when_it_is_not_true(
    built: Toy, ended: list[subprocess.Popen[str]]
) -> None:
    built.set("sft.value", 2)
    process = built.start("run", "sft", sft={"sleep": 3})
    ended.append(process)
    wait_for(lambda: built.calls("sft") == 2)
    process.kill()
    process.communicate(timeout=20)
    built.set("sft.value", 3)
    wait_for(lambda: "value: 3" in (built.root / "dvc.lock").read_text())  # DVC believes that 3 made it
    done = built.ratchet("run", "sft")
    assert "sft ended unwatched after its inputs had changed" in done.stdout
    assert built.calls("sft") == 3
    assert '"sft", 3' in (built.root / "data/sft/value.json").read_text()


def test_a_round_that_something_still_reads_is_not_moved_away(built: Toy) -> None:
    params = yaml.safe_load((built.root / "params.yaml").read_text())
    del params["rounds"]["2"]
    (built.root / "params.yaml").write_text(yaml.safe_dump(params))
    assert built.reasons("distill") == ["input data/rl/2 is missing"]
    refused = built.ratchet("run", check=2)
    assert "distill reads data/rl/2, which does not exist and which no stage makes" in refused.stderr
    assert (built.root / "data/rl/2").exists()


def test_a_second_run_says_who_runs(toy: Toy, ended: list[subprocess.Popen[str]]) -> None:
    process = toy.start("run", "base", base={"sleep": 60})
    ended.append(process)
    wait_for(lambda: toy.calls("base") == 1)
    refused = toy.ratchet("run", check=2)
    assert f"process {process.pid}" in refused.stderr
    planned = toy.ratchet("plan")
    assert "never built" in planned.stdout
    logged = toy.ratchet("logs", "base")
    assert logged.stdout.startswith("=== base  ")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)


def test_a_change_while_a_stage_runs_is_not_recorded_as_its_input(
    built: Toy, ended: list[subprocess.Popen[str]]
) -> None:
    lock = (built.root / "dvc.lock").read_text()
    built.set("sft.value", 2)
    process = built.start("run", "sft", sft={"sleep": 3})
    ended.append(process)
    wait_for(lambda: built.calls("sft") == 2)
    time.sleep(0.3)
    built.set("sft.value", 3)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "params.yaml or the code changed while sft was running" in output
    assert yaml.safe_load((built.root / "dvc.lock").read_text()) == yaml.safe_load(lock)
    built.ratchet("run", "sft")
    assert built.calls("sft") == 3  # nothing wrong was kept in the run cache either
    assert '"sft", 3' in (built.root / "data/sft/value.json").read_text()


def test_an_output_deleted_or_edited_by_hand_comes_back_from_the_cache(built: Toy) -> None:
    shutil.rmtree(built.root / "data/base")
    (built.root / "data/reward/value.json").write_text("edited")
    assert built.reasons("base") == ["output data/base is missing"]
    assert built.reasons("reward") == ["output data/reward was modified"]
    assert built.states()["sft"] == "may-become-stale"
    done = built.ratchet("run")
    assert "base: restored from cache" in done.stdout
    assert built.states() == dict.fromkeys(STAGES, "fresh")
    assert built.calls("base") == 1 and built.calls("sft") == 1


def test_without_cache_a_damaged_output_is_built_again(built: Toy) -> None:
    shutil.rmtree(built.root / ".dvc/cache")
    (built.root / "data/base/value.json").write_text("edited")
    assert "output data/sft is not in DVC's cache" in built.reasons("sft")
    built.ratchet("run")
    assert built.calls("base") == 2
    assert built.states() == dict.fromkeys(STAGES, "fresh")


def test_a_restored_output_that_no_record_describes_is_not_used(built: Toy) -> None:
    log = built.root / "data/lineage/log.jsonl"
    log.parent.mkdir()
    statement = {
        "subject": [{"name": "data/base/value.json", "digest": {"sha256": "0" * 64}}],
        "predicate": {"buildDefinition": {"externalParameters": {"stage": "base"}}},
    }
    log.write_text(json.dumps({"previous": None, "statement": statement}) + "\n")
    shutil.rmtree(built.root / "data/base")
    failed = built.ratchet("run", "base", check=1)
    assert "no lineage record of base describes" in failed.stderr
    built.ratchet("run", "base", "--force")
    assert built.calls("base") == 2


def test_leftovers_of_a_removed_round_are_moved_away(built: Toy) -> None:
    (built.root / "data/rl/3").mkdir()
    (built.root / "data/rl/3/value.json").write_text("old round")
    assert built.states() == {**dict.fromkeys(STAGES, "fresh"), "data/rl/3": "orphan"}
    done = built.ratchet("run")
    assert "data/rl/3 belongs to no stage any more" in done.stdout
    assert not (built.root / "data/rl/3").exists()
    assert list((built.root / ".ratchet/orphans").glob("*/data/rl/3/value.json"))
    assert built.states() == dict.fromkeys(STAGES, "fresh")


def test_adding_a_round_runs_it_and_what_follows_only(built: Toy) -> None:
    before = built.total_calls()
    params = yaml.safe_load((built.root / "params.yaml").read_text())
    params["rounds"]["3"] = {"init": "data/rl/2"}
    (built.root / "params.yaml").write_text(yaml.safe_dump(params))
    states = built.states()
    assert states["rl@1"] == states["rl@2"] == "fresh"
    assert states["rl@3"] == "missing" and states["evaluate"] == "may-become-stale"
    built.ratchet("run")
    after = built.total_calls()
    assert {n: after[n] - before[n] for n in after if after[n] != before[n]} == {"rl": 1, "evaluate": 1}


def test_the_stage_environment_is_fixed(toy: Toy) -> None:
    document = yaml.safe_load((toy.root / "dvc.yaml").read_text())
    script = (
        "import os, sys; os.makedirs('data/base');"
        " open('data/base/e', 'w').write(sys.executable + ' ' + os.environ['PYTHONHASHSEED'])"
    )
    command = f'python -c "{script}"'
    document["stages"] = {"base": {"cmd": command, "params": ["base"], "outs": ["data/base"]}}
    (toy.root / "dvc.yaml").write_text(yaml.safe_dump(document))
    os.environ["SHELL"], shell = "/usr/bin/false", os.environ.get("SHELL", "/bin/sh")
    try:
        toy.ratchet("run")
    finally:
        os.environ["SHELL"] = shell
    text = (toy.root / "data/base/e").read_text().split()
    assert os.path.dirname(text[0]) == os.path.dirname(sys.executable)
    assert text[1] == "0"
