"""One run at a time in a project, and what the last one left running."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.errors import UserError

_FILE = ".ratchet/run.lock"
_PATIENCE = 0.5  # seconds; `run_in_progress` holds the lock for an instant


@contextmanager
def run_lock(root: Path) -> Iterator[None]:
    """Hold the project's run lock. Raises UserError naming the process that holds it already."""
    path = root / _FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _PATIENCE
    with open(path, "a+", encoding="utf-8") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    stream.seek(0)
                    raise UserError(_busy(stream.read())) from None
                time.sleep(0.05)
        stream.seek(0)
        stream.truncate()
        json.dump({"pid": os.getpid(), "started": time.time()}, stream)
        stream.flush()
        try:
            yield
        finally:
            stream.seek(0)
            stream.truncate()
            fcntl.flock(stream, fcntl.LOCK_UN)


def _busy(text: str) -> str:
    try:
        holder = json.loads(text)
        since = time.strftime("%H:%M:%S", time.localtime(holder["started"]))
        who = f"process {holder['pid']}, started at {since},"
    except (ValueError, KeyError):
        who = "another process"
    return f"{who} is running this project already. Wait for it, or end it with Ctrl-C where it runs."


def run_in_progress(root: Path) -> bool:
    """Whether a process holds the project's run lock."""
    path = root / _FILE
    if not path.exists():
        return False
    with open(path, encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(stream, fcntl.LOCK_UN)
    return False
