"""How a stage execution ends, whichever way it ends: the outcome file, the MLflow run, the exit code.

`.ratchet/outcomes/STAGE.json`: `{stage, status, kind, message, exit_code, started, ended, seconds,
startup_seconds, mlflow_run_id, resumed_from, input_digest, token}`; status is succeeded, republished, failed or
interrupted, kind is user, internal or null, times are seconds since the epoch, token is RATCHET_TOKEN of the run
that started the stage.

A signal is handled by a thread of its own, because the main thread may be inside one long call of a library.
It needs no help from the stage: scratch space survives anything, so being stopped is like being killed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tasks.recording import scrub
from tasks.yamlfile import write_atomically

if TYPE_CHECKING:
    from tasks.execution import Execution
    from tasks.recording import Recorder

OUTCOMES = Path(".ratchet/outcomes")
_NO_MEMORY = re.compile("out of memory|can't allocate memory|Cannot allocate memory")
_SIGNAL_GRACE = 0.8  # seconds a signal waits for a stage that is publishing
_RECORDER_GRACE = 0.4  # seconds a signal leaves MLflow to hear of it


class Ending:
    """Collects what the outcome file will say and ends the process, once."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self._born = _process_start()
        self._fields: dict[str, Any] = {"mlflow_run_id": None, "resumed_from": None, "input_digest": None}
        self._recorder: Recorder | None = None
        self._execution: Execution | None = None
        self._began = 0.0
        self._turn = threading.Lock()  # whoever holds it, the stage or a signal, decides how this ends
        self._closing = False
        self._code = 1

    def note(self, **fields: Any) -> None:
        self._fields |= fields

    def record(self, recorder: Recorder) -> None:
        """From now on there is an MLflow run to end."""
        self._recorder = recorder

    def computing(self, execution: Execution) -> None:
        """The stage's own code begins; start-up lasts until its first progress report."""
        self._execution, self._began = execution, time.time()

    def close(self) -> None:
        """The result is there: a signal now lets the stage publish, if that takes less than a second."""
        if not self._closing:
            self._turn.acquire()
            self._closing = True

    def succeed(self, status: str, message: str) -> None:
        print(f"{self.stage}: {message}", flush=True)
        self._end(status, None, message, 0, "FINISHED")

    def refuse(self, message: str) -> None:
        """End with exit code 2, leaving the outcome file to the process that runs the stage."""
        self.close()
        print(f"{self.stage}: {message}", file=sys.stderr, flush=True)
        self._code = 2

    def fail(self, kind: str, message: str, code: int) -> None:
        self.close()
        print(f"{self.stage}: {message}", file=sys.stderr, flush=True)
        self._end("failed", kind, message, code, "FAILED")

    def leave(self) -> NoReturn:
        sys.exit(self._code)

    def watch_signals(self) -> None:
        """End the stage on SIGTERM or SIGINT within a second, wherever its main thread is."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._await_signal, args=(reader, numbers), daemon=True).start()

        _keep_from_forks(numbers)

    def _await_signal(self, reader: int, numbers: tuple[int, ...]) -> None:
        while (number := os.read(reader, 1)[0]) not in numbers:
            pass
        self._turn.acquire(timeout=_SIGNAL_GRACE)
        message = f"stopped by {signal.Signals(number).name}; the next run goes on from the last checkpoint"
        try:
            print(f"{self.stage}: {message}", file=sys.stderr, flush=True)
            self._end("interrupted", None, message, 128 + number, "KILLED", _RECORDER_GRACE)
        finally:
            os._exit(128 + number)

    def _end(
        self,
        status: str,
        kind: str | None,
        message: str,
        code: int,
        run_status: str,
        patience: float | None = None,
    ) -> None:
        self._code = code
        self._write(status, kind, message)  # first, in case the process is killed while MLflow is told
        if self._recorder is not None:
            warning = self._recorder.finish(run_status, patience)
            if warning:
                print(f"{self.stage}: warning: {warning}", file=sys.stderr, flush=True)
            self._write(status, kind, message)

    def _write(self, status: str, kind: str | None, message: str) -> None:
        ended = time.time()
        computed = (self._execution.first_progress if self._execution else None) or self._began or ended
        run = self._recorder.run_id if self._recorder else None
        outcome = {
            "stage": self.stage,
            "status": status,
            "kind": kind,
            "message": message,
            "exit_code": self._code,
            "started": round(self._born, 3),
            "ended": round(ended, 3),
            "seconds": round(ended - self._born, 3),
            "startup_seconds": round(computed - self._born, 3),
            **self._fields,
            "mlflow_run_id": run,
            "token": os.environ.get("RATCHET_TOKEN"),
        }
        with suppress(OSError):  # a full disk may be what ended the stage; the exit code and the log still say it
            write_atomically(OUTCOMES / f"{self.stage}.json", json.dumps(outcome, indent=1) + "\n")


def _keep_from_forks(numbers: tuple[int, ...]) -> None:
    """Give forked workers of the stage the default signal handling, so that their end is not taken for the stage's.

    The signals wait while a fork is going on: one that comes early would still meet the handler of the stage.
    """

    def in_child() -> None:
        signal.set_wakeup_fd(-1)
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, numbers),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers),
        after_in_child=in_child,
    )


def in_words(error: BaseException) -> str:
    """One sentence for a tired person about an exception that is no UserError."""
    name, text = type(error).__name__, scrub(str(error).strip().partition("\n")[0])[:300]
    again = "run it again: it goes on from the last checkpoint"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" while writing {error.filename}" if error.filename else ""
        return f"the disk is full{where}; free some space and {again}"
    if isinstance(error, MemoryError) or "OutOfMemory" in name or _NO_MEMORY.search(text):
        return f"the memory is used up; lower batch or sample counts in params.yaml or close programs, {again}"
    if isinstance(error, PermissionError):
        return f"no permission for {error.filename or text}; change its owner or mode and {again}"
    if isinstance(error, SystemExit):
        return f"the stage's code ended the process itself (exit status {error.code})"
    return f"{name}: {text}" if text else f"{name}, without a message"


def _process_start() -> float:
    """When this process began, in seconds since the epoch; the imports so far count as start-up."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:  # not Linux
        return time.time() - time.process_time()
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
