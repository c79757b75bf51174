"""A stage as a process group: started, followed through its log, and ended with everything it started.

The group writes straight into the log file, so it neither blocks on nor dies with the process that follows
it. Every process of a group carries a token in its environment; by that the group is found again after a crash
of whoever started it, and a process that left the group is found too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.yamlfile import write_atomically

RUNNING = ".ratchet/running"
LOGS = ".ratchet/logs"
TOKEN = "RATCHET_TOKEN"
TERM_PATIENCE = 2.0  # seconds between asking a group to end and killing it
_LOG_LIMIT = 20 << 20


class Group:
    """Processes with a token: who of them is alive, and how to end them.

    A token that ends in a dot stands for all groups of a run. Where there is no /proc, members are those of the process
    group of `leader`.
    """

    def __init__(self, leader: int, token: str) -> None:
        self.leader, self.token = leader, token

    def members(self) -> list[int]:
        """Process ids that are alive, not counting ended ones that nobody has waited for."""
        if Path("/proc/self/stat").exists():
            return [pid for pid in _process_ids() if self._is_member(pid)]
        listing = subprocess.run(["ps", "-axo", "pid=,pgid=,stat="], capture_output=True, text=True, check=True)
        rows = [line.split() for line in listing.stdout.splitlines()]
        return [int(pid) for pid, group, state in rows if self.leader and int(group) == self.leader and state[0] != "Z"]

    def _is_member(self, pid: int) -> bool:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                return False
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False
        mark = f"{TOKEN}={self.token}".encode()
        return any(item == mark or (mark.endswith(b".") and item.startswith(mark)) for item in environment.split(b"\0"))

    def signal(self, number: int) -> list[int]:
        found = self.members()
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return found


def _process_ids() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            yield int(entry.name)


def end(groups: Iterable[Group], patience: float = TERM_PATIENCE) -> None:
    """Ask groups to end, kill what is left after `patience` seconds; nothing of them is alive afterwards."""
    waiting = list(groups)
    for group in waiting:
        group.signal(signal.SIGTERM)
    deadline = time.monotonic() + patience
    while waiting and time.monotonic() < deadline:
        waiting = [group for group in waiting if group.members()]
        time.sleep(0.02 if waiting else 0)
    while waiting:
        waiting = [group for group in waiting if group.signal(signal.SIGKILL)]
        time.sleep(0.02 if waiting else 0)


class StageProcess:
    """One running stage: `poll` tells when its leader has ended, `lines` what it has said since last asked."""

    def __init__(
        self, root: Path, stage: str, command: list[str], header: str, run_token: str, note: dict[str, Any]
    ) -> None:
        """`run_token` ends in a dot. `note` is kept on disk until `forget`, for a run that follows a crash."""
        self.root, self.stage = root, stage
        self.started = time.time()
        self._begun = time.monotonic()
        self.seconds = 0.0
        self.log = log_path(root, stage)
        self._rotate()
        with open(self.log, "ab") as stream:
            stream.write(f"=== {stage}  {time.strftime('%Y-%m-%d %H:%M:%S')}  {header}\n".encode())
            stream.flush()
            self._offset = self._first = stream.tell()
            token = f"{run_token}{uuid.uuid4().hex}"
            self._process = subprocess.Popen(
                command,
                cwd=root,
                env={**environment(), TOKEN: token},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.group = Group(self._process.pid, token)
        self._record = root / RUNNING / f"{stage}.json"
        write_atomically(
            self._record,
            json.dumps({**note, "stage": stage, "pid": self._process.pid, "token": token, "started": self.started}),
        )
        self._partial = b""

    def _rotate(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > _LOG_LIMIT:
            self.log.replace(self.log.with_suffix(".log.1"))

    def poll(self) -> int | None:
        """The exit status of the leader, negative for a signal; None while it runs."""
        code = self._process.poll()
        if code is None or not self.seconds:
            self.seconds = time.monotonic() - self._begun
        return code

    def lines(self) -> list[str]:
        """Whole lines written since the last call; the unfinished rest too once the leader has ended."""
        ended = self._process.poll() is not None
        with open(self.log, "rb") as stream:
            stream.seek(self._offset)
            fresh = stream.read()
        self._offset += len(fresh)
        *whole, self._partial = (self._partial + fresh).split(b"\n")
        if ended and self._partial:
            whole.append(self._partial)
            self._partial = b""
        return [line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2] for line in whole]

    def output(self) -> str:
        """Everything the stage has written in this run."""
        with open(self.log, "rb") as stream:
            stream.seek(self._first)
            return stream.read().decode("utf-8", "replace")

    @property
    def is_over(self) -> bool:
        """Whether nothing of the group is alive any more."""
        return self._process.poll() is not None and not self.group.members()

    def forget(self) -> None:
        """Remove the note that lets a later run find this group."""
        self._record.unlink(missing_ok=True)


def settle(processes: Iterable[StageProcess], patience: float) -> None:
    """Let side processes that outlive their stage finish, then end them, and forget the groups."""
    processes = list(processes)
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and not all(process.is_over for process in processes):
        time.sleep(0.02)
    end(process.group for process in processes if not process.is_over)
    for process in processes:
        process.poll()
        process.forget()


def end_leftovers(root: Path) -> list[dict[str, Any]]:
    """End the stages that an earlier, killed run left running. Returns the notes of all it had not ended itself.

    The notes have a key "ended": the process that was still alive, or None.
    """
    notes = []
    for record in sorted((root / RUNNING).glob("*.json")):
        try:
            note = json.loads(record.read_text(encoding="utf-8"))
            group = Group(int(note["pid"]), str(note["token"]))
        except (ValueError, KeyError):
            record.unlink()
            continue
        alive = group.members()
        end([group])
        notes.append({**note, "ended": alive[0] if alive else None})
        record.unlink()
    return notes


def log_path(root: Path, stage: str) -> Path:
    return root / LOGS / f"{stage}.log"


def environment() -> dict[str, str]:
    """The environment of stage processes: this interpreter first, no telemetry, fixed hash seed and shell."""
    bin_directory = str(Path(sys.executable).parent)
    path = [
        bin_directory,
        *(p for p in os.environ.get("PATH", "").split(os.pathsep) if p and p != bin_directory),
    ]
    return {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "SHELL": "/bin/sh",  # DVC runs commands in the user's own shell otherwise
        "DVC_NO_ANALYTICS": "1",
        "DO_NOT_TRACK": "true",
        "COLUMNS": "200",
    }
