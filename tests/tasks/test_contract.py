"""What every stage does around its own code: same bytes, resume, publish, fail without a trace."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tasks import digests
from tests.tasks.project import Project, make_project


def _tree(root: Path, path: str) -> dict[str, str]:
    return digests.tree(root / path)


# --- bytes and publishing -------------------------------------------------------------------------------------


def test_two_runs_give_the_same_bytes_and_nothing_else(finished: Project, tmp_path: Path) -> None:
    other = make_project(tmp_path / "elsewhere")
    other.run_all()
    for out in ("corpus", "model", "tuned", "report"):
        assert _tree(finished.root, f"data/{out}") == _tree(other.root, f"data/{out}")
    assert sorted(p.name for p in (other.root / "data").iterdir()) == [
        "corpus", "lineage", "model", "raw", "report", "tuned",
    ]  # fmt: skip


def test_a_lost_output_is_published_again_without_computing(finished: Project) -> None:
    before = _tree(finished.root, "data/model")
    records = len(finished.records())
    spooled = sorted((finished.root / ".ratchet/mlflow-spool").glob("*.jsonl"))
    shutil.rmtree(finished.root / "data/model")
    done = finished.run("model")
    assert done.returncode == 0
    assert finished.outcome("model")["status"] == "republished"
    assert finished.outcome("model")["mlflow_run_id"] is None
    assert _tree(finished.root, "data/model") == before
    assert len(finished.records()) == records
    assert sorted((finished.root / ".ratchet/mlflow-spool").glob("*.jsonl")) == spooled


def test_a_record_that_a_kill_prevented_is_written_with_the_publication(finished: Project) -> None:
    """Killed after the manifest was written: the log lacks the record and the output is not in place."""
    log = finished.root / "data/lineage/log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:1]))
    shutil.rmtree(finished.root / "data/model")
    assert finished.run("model").returncode == 0
    assert [r["predicate"]["buildDefinition"]["externalParameters"]["stage"] for r in finished.records()] == [
        "corpus",
        "model",
    ]
    assert log.read_text() == "".join(lines[:2])


def test_a_damaged_finished_output_is_computed_again(finished: Project) -> None:
    before = _tree(finished.root, "data/model")
    (weights,) = (finished.root / ".ratchet/scratch/model").glob("*/output/model.safetensors")
    weights.write_bytes(b"damaged")
    assert finished.run("model").returncode == 0
    assert finished.outcome("model")["status"] == "succeeded"
    assert _tree(finished.root, "data/model") == before


def test_an_older_output_is_replaced_as_a_whole(finished: Project) -> None:
    (finished.root / "data/model/leftover.txt").write_text("of another run")
    assert finished.run("model").returncode == 0
    assert "leftover.txt" not in _tree(finished.root, "data/model")


def test_a_kill_while_publishing_leaves_nothing_half_written(project: Project) -> None:
    project.stage(
        "corpus",
        """
        for number in range(400):
            (stage.output / f"{number}.txt").write_text("x" * 100_000)
        """,
    )
    project.refresh()
    process = project.start("corpus")
    while not list((project.root / "data").glob(".corpus.publishing/*")):
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.communicate(timeout=30)
    assert not (project.root / "data/corpus").exists()
    assert project.run("corpus").returncode == 0
    assert project.outcome("corpus")["status"] == "republished"
    assert len(_tree(project.root, "data/corpus")) == 400
    assert not (project.root / "data/.corpus.publishing").exists()
    assert len(project.records()) == 1


# --- resume ---------------------------------------------------------------------------------------------------

_KILLED_ONCE = """
    import os, signal
    checkpoint = stage.scratch / "checkpoint.txt"
    done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    print("resumed" if stage.is_resumed else "fresh", "at", done)
    for step in range(done, 6):
        checkpoint.write_text(str(step + 1))
        if step == 2 and not stage.is_resumed:
            (stage.output / "half.txt").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    (stage.output / "steps.txt").write_text("6")
"""


def test_a_killed_stage_goes_on_where_it_stopped(project: Project) -> None:
    project.stage("corpus", _KILLED_ONCE)
    project.refresh()
    killed = project.run("corpus")
    assert killed.returncode == -signal.SIGKILL
    assert not (project.root / "data/corpus").exists()
    again = project.run("corpus")
    assert "resumed at 3" in again.stdout
    assert _tree(project.root, "data/corpus").keys() == {"steps.txt"}
    assert project.outcome("corpus")["resumed_from"]


def test_work_on_other_inputs_is_not_resumed(project: Project) -> None:
    project.stage("corpus", _KILLED_ONCE)
    project.refresh()
    project.run("corpus")
    project.write("data/raw/words.txt", "four\n")
    assert "fresh at 0" in project.run("corpus").stdout


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("data/raw/words.txt", "three", "four", True),
        ("params.yaml", "corpus: {size: 3}", "corpus: {size: 2}", True),
        ("tasks/corpus.py", "stage.params.size]", "stage.params.size + 1]", True),
        ("params.yaml", "model: {size: 4}", "model: {size: 9}", False),
        ("tasks/corpus.py", "class Params(Strict):", "# a comment\nclass Params(Strict):", False),
    ],
    ids=["input", "own parameter", "own code", "parameter of another stage", "a comment"],
)
def test_the_input_digest_changes_with_what_the_stage_depends_on(
    finished: Project, file: str, old: str, new: str, expected: bool
) -> None:
    before = finished.outcome("corpus")["input_digest"]
    text = (finished.root / file).read_text()
    assert old in text
    (finished.root / file).write_text(text.replace(old, new))
    finished.refresh()
    assert finished.run("corpus").returncode == 0
    assert (finished.outcome("corpus")["input_digest"] != before) is expected


# --- failing --------------------------------------------------------------------------------------------------


def test_a_mistake_of_the_user_is_a_message_and_nothing_more(finished: Project) -> None:
    before = _tree(finished.root, "data/model")
    finished.stage(
        "model",
        """
        from pipelines.errors import UserError
        (stage.output / "half.txt").write_text("half")
        raise UserError("params.yaml: model.size: too small for this corpus")
        """,
    )
    finished.refresh()
    done = finished.run("model")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "model: params.yaml: model.size: too small for this corpus"
    assert "Traceback" not in done.stderr
    outcome = finished.outcome("model")
    assert (outcome["status"], outcome["kind"], outcome["exit_code"]) == ("failed", "user", 2)
    assert _tree(finished.root, "data/model") == before


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ('import errno; raise OSError(errno.ENOSPC, "No space left on device", "weights")',
         "the disk is full while writing weights; free some space and "
         "run it again: it goes on from the last checkpoint"),
        ('raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 9 bytes")',
         "the memory is used up; lower batch or sample counts in params.yaml or close programs, "
         "run it again: it goes on from the last checkpoint"),
        ('raise RuntimeError("no answer from http://me:secret@host/path")',
         "RuntimeError: no answer from http://***@host/path"),
        ("raise SystemExit(0)", "the stage's code ended the process itself (exit status 0)"),
    ],
)  # fmt: skip
def test_a_fault_of_the_program_has_a_traceback_and_one_sentence(
    finished: Project, statement: str, sentence: str
) -> None:
    before = _tree(finished.root, "data/model")
    finished.stage("model", f'(stage.output / "half.txt").write_text("half")\n{statement}')
    finished.refresh()
    done = finished.run("model")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "secret" not in done.stderr
    outcome = finished.outcome("model")
    assert (outcome["status"], outcome["kind"], outcome["message"]) == ("failed", "internal", sentence)
    assert _tree(finished.root, "data/model") == before
    assert not list((finished.root / "data").glob(".*"))


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("pass", "without writing any output"),
        ('(stage.output / "weights.pt").write_bytes(b"x")', "weights.pt is a pickle"),
        ('import os; (stage.output / "a.json").write_text(os.getcwd())', "a.json names a place on this machine"),
        ('import os; os.symlink("/etc/hosts", stage.output / "hosts.txt")', "hosts.txt is a link"),
        ('exec("import tasks.report"); (stage.output / "a.txt").write_text("a")', "the stage loaded tasks/report.py"),
        ('stage.input("data/model")', "stage corpus reads data/model without declaring it"),
        ('stage.settings.section("model")', "the stage reads parameter model without declaring it"),
    ],
    ids=["empty", "pickle", "absolute path", "link", "module outside code.lock", "undeclared input", "parameter"],
)  # fmt: skip
def test_a_stage_that_breaks_the_contract_publishes_nothing(project: Project, body: str, sentence: str) -> None:
    project.stage("corpus", body)
    project.refresh()
    done = project.run("corpus")
    assert done.returncode in (1, 2)
    assert sentence in project.outcome("corpus")["message"]
    assert not (project.root / "data/corpus").exists()


def test_object_arrays_are_pickles(project: Project) -> None:
    project.stage(
        "corpus",
        """
        import numpy
        numpy.save(stage.output / "numbers.npy", numpy.arange(3))
        numpy.save(stage.output / "objects.npy", numpy.array([{}], dtype=object))
        """,
    )
    project.refresh()
    project.run("corpus")
    assert "objects.npy is a pickle" in project.outcome("corpus")["message"]


def test_a_missing_input_names_the_stage_that_makes_it(project: Project) -> None:
    done = project.run("model")
    assert done.returncode == 2
    assert done.stderr == "model: input data/corpus does not exist; run `ratchet run corpus` first\n"


def test_an_outdated_code_lock_is_refused(project: Project) -> None:
    project.stage("corpus", '(stage.output / "a.txt").write_text("other")')
    done = project.run("corpus")
    assert done.returncode == 2
    assert "code tasks/corpus.py changed" in done.stderr
    assert "run `ratchet plan`" in done.stderr


def test_wrong_parameters_are_refused_before_anything_runs(project: Project) -> None:
    text = (project.root / "params.yaml").read_text()
    (project.root / "params.yaml").write_text(text.replace("corpus: {size: 3}", "corpus: {size: 0}"))
    done = project.run("corpus")
    assert done.returncode == 2
    assert done.stderr == "corpus: params.yaml: corpus.size: found 0 (int); allowed: an integer >= 1\n"
    assert not (project.root / ".ratchet/scratch").exists()


# --- signals and company --------------------------------------------------------------------------------------

_LONG = """
    import hashlib
    (stage.scratch / "checkpoint.txt").write_text("1")
    print("deep in a library", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_stage_within_a_second_wherever_it_is(project: Project, number: signal.Signals) -> None:
    project.stage("corpus", _LONG)
    project.refresh()
    process = project.start("corpus")
    assert process.stdout and process.stdout.readline() and process.stdout.readline()
    started = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - started < 1.5
    assert process.returncode == 128 + number
    outcome = project.outcome("corpus")
    assert (outcome["status"], outcome["kind"], outcome["exit_code"]) == ("interrupted", None, 128 + number)
    assert f"stopped by {number.name}" in err
    assert not (project.root / "data/corpus").exists()


def test_the_end_of_a_forked_worker_is_not_the_end_of_the_stage(project: Project) -> None:
    project.stage(
        "corpus",
        """
        import multiprocessing, time
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        worker.terminate()
        worker.join()
        time.sleep(0.3)
        (stage.output / "a.txt").write_text(str(worker.exitcode))
        """,
    )
    project.refresh()
    assert project.run("corpus").returncode == 0
    assert (project.root / "data/corpus/a.txt").read_text() == str(-signal.SIGTERM)


def test_a_second_process_of_a_stage_is_refused(project: Project) -> None:
    project.stage("corpus", _LONG)
    project.refresh()
    first = project.start("corpus")
    assert first.stdout and first.stdout.readline() and first.stdout.readline()
    second = project.run("corpus")
    assert second.returncode == 2
    assert second.stderr == f"corpus: already running as process {first.pid}; wait for it or stop it\n"
    assert not (project.root / ".ratchet/outcomes/corpus.json").exists()
    first.terminate()
    first.communicate(timeout=30)


# --- environment and reports ----------------------------------------------------------------------------------


def test_a_stage_runs_offline_with_fixed_threads_and_hash_seed(project: Project) -> None:
    project.stage(
        "corpus",
        """
        import os
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONHASHSEED", "HF_HUB_OFFLINE", "DO_NOT_TRACK")
        (stage.output / "a.txt").write_text(" ".join(os.environ[name] for name in names) + f" {hash('a')}")
        """,
    )
    project.refresh()
    for seed in ("1", "random"):
        shutil.rmtree(project.root / ".ratchet", ignore_errors=True)
        assert project.run("corpus", PYTHONHASHSEED=seed, OMP_NUM_THREADS="9").returncode == 0
        expected = f"1 1 0 1 true {_hash_without_seed('a')}"
        assert (project.root / "data/corpus/a.txt").read_text() == expected


def _hash_without_seed(text: str) -> int:
    import subprocess
    import sys

    command = [sys.executable, "-c", f"print(hash({text!r}))"]
    done = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, check=True)
    return int(done.stdout)


def test_progress_is_written_and_its_end_is_never_lost(finished: Project) -> None:
    import json

    shown = json.loads((finished.root / ".ratchet/progress/model.json").read_text())
    assert (shown["stage"], shown["done"], shown["total"], shown["unit"]) == ("model", 4, 4, "steps")
    assert shown["metrics"] == {"loss": 0.25}


def test_the_outcome_says_what_a_driver_needs(finished: Project) -> None:
    outcome = finished.outcome("tuned@1")
    assert list(outcome) == [
        "stage", "status", "kind", "message", "exit_code", "started", "ended", "seconds", "startup_seconds",
        "mlflow_run_id", "resumed_from", "input_digest",
        "token",
    ]  # fmt: skip
    assert (outcome["stage"], outcome["status"], outcome["exit_code"]) == ("tuned@1", "succeeded", 0)
    assert 0 < outcome["startup_seconds"] <= outcome["seconds"] < 60
    assert abs(outcome["ended"] - outcome["started"] - outcome["seconds"]) < 0.01


def test_a_damaged_lineage_log_is_said_before_anything_is_computed(finished: Project) -> None:
    log = finished.root / "data/lineage/log.jsonl"
    for damage in ("[]\n", "<<<<<<< HEAD\n"):
        log.write_text(damage + log.read_text())
        (finished.root / "params.yaml").write_text(
            (finished.root / "params.yaml").read_text().replace("model: {size: 4}", "model: {size: 5}")
        )
        done = finished.run("model")
        assert done.returncode == 2
        assert "line 1 is not a lineage record" in done.stderr and "computing" not in done.stdout
