"""MLflow as a view of stage executions: useful, mutable, never needed.

The stage process does not import MLflow. A `Recorder` appends events to a journal in `.ratchet/mlflow-spool/`
and starts one courier (tasks/courier.py), a process that imports MLflow beside the stage's own start-up and
carries the events over. A tracking server that is down or hangs can therefore only delay the end of a stage, by
at most `PATIENCE` seconds; its journal then stays, and the courier of a later stage delivers it. The same happens
to the journal of a stage that was killed: its run ends as KILLED. A delivered journal is deleted.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

SPOOL = Path(".ratchet/mlflow-spool")
PATIENCE = 2.5  # seconds a stage waits at its end for a tracking server, all its waits together
LOCAL_PATIENCE = 60.0  # the same for what cannot hang: importing MLflow, a local database that nobody has locked
LOCAL_PHASES = (None, "importing", "creating", "local")
TIMEOUT = 2  # seconds of one request to a tracking server
EVERY = 5.0  # seconds between two batches of metrics
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s'\"]+@")


def scrub(text: str) -> str:
    """`text` with the user and password of every URI in it replaced by ***."""
    return _CREDENTIALS.sub("***@", text)


def tracking_uri(root: Path) -> str:
    """MLFLOW_TRACKING_URI, or the project's own SQLite database."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root.resolve()}/.ratchet/mlflow.db"


def experiment_name(root: Path) -> str:
    return os.environ.get("RATCHET_EXPERIMENT") or root.resolve().name


def handed_down_tags() -> dict[str, str]:
    """The tags a parent process passes in RATCHET_TAGS, a JSON object of strings."""
    given = os.environ.get("RATCHET_TAGS")
    return {str(name): scrub(str(value)) for name, value in json.loads(given).items()} if given else {}


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested parameters as dotted names and texts, the way MLflow shows them."""
    flat: dict[str, str] = {}
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write by rename, without waiting for the disk: what is written here may be lost with the machine."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content))
    os.replace(part, path)


def read_json(path: Path) -> dict[str, Any]:
    """The content of a file of `write_json`, or {} when there is none, or one that a power cut left half written."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def state_path(journal: Path) -> Path:
    """Where a courier notes how far it came: sent (bytes), run_id, model_id, phase, error, uri."""
    return journal.with_suffix(".state")


class Recorder:
    """Writes the journal of one stage execution and looks after its courier."""

    def __init__(self, root: Path, stage: str, invocation: str) -> None:
        self._root = root
        self._journal = root / SPOOL / f"{stage}-{invocation}.jsonl"
        self._journal.parent.mkdir(parents=True, exist_ok=True)
        # line by line, so that a kill loses nothing; open for the life of the stage
        self._file = open(self._journal, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)  # while held, no other courier takes this journal for an abandoned one
        self._waited = 0.0
        self._local_patience = LOCAL_PATIENCE
        self._courier: subprocess.Popen[bytes] | None = None
        self._invocation = invocation
        self._run_file = Path()

    def start(self, run_file: Path, **event: Any) -> None:
        """Open the run: experiment, run_name, tags, params, datasets, parents (output digests)."""
        self._run_file = run_file
        self._add({"event": "start", "time": milliseconds(), "run_file": str(run_file), **event})
        self._courier = subprocess.Popen(
            [sys.executable, "-m", "tasks.courier", str(self._journal)],
            cwd=self._root,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_mlflow_environment()},
            pass_fds=[self._file.fileno()],  # the lock outlives a killed stage until its courier is done
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Note metrics of one step; they leave in batches."""
        if self._file.closed:  # a signal has ended the run while the stage's loop takes its last step
            return
        values = {name: float(value) for name, value in values.items()}
        self._add({"event": "metrics", "time": milliseconds(), "step": int(step), "values": values})

    def output(self, **event: Any) -> None:
        """Note a checkpoint: name, path, digest, tags."""
        self._add({"event": "output", **event})
        self._ring()

    def ids(self) -> tuple[str | None, str | None]:
        """MLflow's ids of the run and the model, where the courier gets them within the patience left."""
        self._wait(lambda state: state.get("sent", 0) >= self._file.tell())
        return self.run_id, read_json(state_path(self._journal)).get("model_id")

    @property
    def run_id(self) -> str | None:
        """The MLflow run of this execution, once the courier has opened it."""
        found = read_json(self._run_file)
        return found.get("run_id") if found.get("invocation") == self._invocation else None

    def finish(self, status: str, patience: float | None = None) -> str | None:
        """End the run as FINISHED, FAILED or KILLED. Returns a warning when MLflow does not have it yet."""
        if patience is not None:
            self._waited, self._local_patience = PATIENCE - patience, patience
        try:
            self._add({"event": "end", "time": milliseconds(), "status": status})
        except (OSError, ValueError) as error:  # a full disk, or a stage that a signal interrupts at its very end
            return f"MLflow does not hear how this run ended: {error}"
        self._ring()
        delivered = self._wait(lambda state: not self._journal.exists())
        self._file.close()
        courier = self._courier
        if courier is None:
            return None
        if courier.stdin:
            with suppress(BrokenPipeError):
                courier.stdin.close()
        if not delivered:
            courier.kill()
        courier.wait()
        if delivered:
            return None
        reason = read_json(state_path(self._journal)).get("error") or "no answer in time"
        return (
            f"MLflow at {scrub(tracking_uri(self._root))} does not have this run yet ({reason}); "
            f"its events wait in {SPOOL} and a later stage delivers them"
        )

    def _add(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")

    def _ring(self) -> None:
        if self._courier and self._courier.stdin:
            with suppress(BrokenPipeError):
                self._courier.stdin.write(b"\n")
                self._courier.stdin.flush()

    def _wait(self, done: Callable[[dict[str, Any]], bool]) -> bool:
        """Wait until the courier has come so far; False when it died or the patience is used up."""
        before = started = time.monotonic()
        while True:
            courier_lives = self._courier is not None and self._courier.poll() is None
            state = read_json(state_path(self._journal))
            if done(state):
                return True
            moment = time.monotonic()
            if state.get("phase") in LOCAL_PHASES:
                patience_left = moment - started < self._local_patience
            else:
                self._waited += moment - before
                patience_left = self._waited < PATIENCE
            if not courier_lives or not patience_left:
                return False
            before = moment
            time.sleep(0.02)


def milliseconds() -> int:
    return time.time_ns() // 1_000_000


def _mlflow_environment() -> dict[str, str]:
    return {
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(TIMEOUT),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "ALEMBIC_LOGGING": "false",
    }
