"""A run of the project, one stage at a time: what to run, starting it, and what came of it.

The local driver and the Prefect flow both work through this; they differ only in who waits for whom.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flows import dvcfiles
from flows.locks import run_lock
from flows.plan import (
    FRESH,
    Judge,
    StageState,
    forced_mark,
    refuse_lacking_engine,
    refuse_missing_inputs,
    refuse_stale_above,
    validate,
)
from flows.process import Group, StageProcess, end, end_leftovers, settle
from flows.restore import previous_output, remove_unrecorded, unrecorded_restore
from pipelines.errors import UserError
from tasks import codelock
from tasks.graph import Graph, load_graph

SCRATCH = ".ratchet/scratch"
_SETTLE = 6.0  # seconds that side processes of a stage may outlive it
_SUCCEEDED = ("done", "restored", "republished", "skipped")
_REPRODUCE = re.compile(r"^ERROR: failed to reproduce '[^']*': ")
NOISE = re.compile(
    r"^(Running stage |Updating lock file |Generating lock file |Use `dvc push`|To track the changes with git"
    r"|To enable auto staging|\tgit add |\tdvc config |> |\s*$)"
)


@dataclass(frozen=True)
class Outcome:
    """How one stage of a run ended."""

    name: str
    status: str  # done, restored, republished, skipped, failed, blocked
    kind: str = ""  # of a failure: user or internal
    message: str = ""
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.status in _SUCCEEDED


@dataclass
class Running:
    """A started stage with what dvc.lock said before and must say after."""

    process: StageProcess
    expected: dict[str, Any]
    previous: dict[str, Any] | None
    reasons: list[str]


class Session:
    """The project while this process holds its run lock."""

    def __init__(self, root: Path, graph: Graph) -> None:
        self.root, self.graph = root, graph
        self.notes = _review_leftovers(root)
        self.code = codelock.refresh(root, graph) or codelock.read(root)
        self._judge = Judge(graph, self.code)
        self.plan = {state.name: state for state in self._judge.plan()}
        self.token = f"{uuid.uuid4().hex}."
        self._running: dict[str, Running] = {}
        self._ended: list[StageProcess] = []
        self._mutex = threading.Lock()
        self.closing = threading.Event()
        """Set when the run is being ended: stages that die from then on have not failed."""

    def take_notes(self) -> list[str]:
        """What a person should be told and has not been yet."""
        notes, self.notes = self.notes, []
        return notes

    def select(self, names: Collection[str], upstream: bool, downstream: bool) -> list[str]:
        """The stages a run concerns, in topological order.

        Raises UserError for an unknown name, and for a stage that stands on a stale one that is not selected.
        """
        chosen = {stage for name in names for stage in self.graph.resolve(name)} or set(self.graph.nodes)
        for stage in list(chosen):
            if upstream:
                chosen.update(self.graph.ancestors(stage))
            if downstream:
                chosen.update(self.graph.descendants(stage))
        refuse_stale_above(self.graph, self.plan, chosen)
        refuse_missing_inputs(self._judge, self.plan, chosen)
        refuse_lacking_engine(self._judge, self.plan, chosen)
        self.notes += _move_orphans(self.root, self._judge.orphans)
        return [name for name in self.graph.nodes if name in chosen]

    def forced(self, names: Collection[str], selected: Collection[str]) -> set[str]:
        """The stages that `--force` means: the named ones, all selected ones when none is named."""
        return {stage for name in names for stage in self.graph.resolve(name)} or set(selected)

    def state(self, name: str) -> StageState:
        """The state of one stage at this moment."""
        return Judge(self.graph, self.code).state(self.graph.nodes[name])

    def start(self, name: str, forced: bool, resume: bool = False) -> Running | None:
        """Start a stage in a process group of its own; None when it is fresh and not forced.

        A forced stage begins from nothing, unless it may `resume` what an earlier attempt of this run left. When an
        earlier forced run did not finish, the stage goes on with that.
        """
        judge = Judge(self.graph, self.code)
        node = self.graph.nodes[name]
        state = judge.state(node)
        if state.state == FRESH and not forced:
            return None
        mark = forced_mark(self.root, name)
        if forced and not resume:
            shutil.rmtree(self._scratch(name), ignore_errors=True)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        reasons = state.reasons or ["forced"]
        options = ["-f"] if mark.exists() else []
        command = [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "-s", *options, name]
        expected, previous = judge.ingredients(node), judge.lock.get(name)
        note = {"expected": expected, "previous": previous}
        with self._mutex:
            process = StageProcess(self.root, name, command, "; ".join(reasons), self.token, note)
            self._running[name] = running = Running(process, expected, previous, reasons)
        return running

    def finish(self, name: str) -> Outcome:
        """What came of a stage whose process has ended; restores the last good output after a failure."""
        with self._mutex:
            running = self._running.pop(name)
            self._ended.append(running.process)
        judge_end = self._succeeded if running.process.poll() == 0 else self._failed
        outcome = judge_end(name, running)
        if outcome.is_good:
            return outcome
        if (running.process.poll() or 0) < 0:  # DVC was killed; what it had started may still be at work
            end([running.process.group])
            dvcfiles.release_ended(self.root)
        return replace(outcome, message="\n".join(filter(None, [outcome.message, self._clear(name, running)])))

    def _clear(self, name: str, running: Running) -> str:
        """Leave no half-written output: bring back the last good one, or nothing at all. Says which."""
        node = self.graph.nodes[name]
        note = previous_output(self.root, node, running.previous) if running.previous else ""
        if f"Running stage '{name}'" in running.process.output():  # DVC had taken the old output away by then
            remove_unrecorded(self.root, node, running.previous or {})
        return note

    def _succeeded(self, name: str, running: Running) -> Outcome:
        process, seconds = running.process, running.process.seconds
        entry = dvcfiles.read_lock(self.root).get(name) or {}
        changed = _untrue_parts(entry, running.expected)
        if changed:
            dvcfiles.replace_entry(self.root, name, running.previous)
            dvcfiles.forget_run(self.root, entry, process.started)
            return Outcome(name, "failed", "user", self._moved_ground(name, changed), seconds, running.reasons)
        text = process.output()
        status = "done"
        if f"Stage '{name}' is cached - skipping run" in text:
            status = "restored"
            problem = unrecorded_restore(self.root, self.graph.nodes[name])
            if problem:
                dvcfiles.replace_entry(self.root, name, running.previous)
                return Outcome(name, "failed", "internal", problem, seconds, running.reasons)
        elif f"Stage '{name}' didn't change, skipping" in text:
            status = "skipped"
        elif self._report(name, process).get("status") == "republished":
            status = "republished"
        forced_mark(self.root, name).unlink(missing_ok=True)
        if status != "restored":
            shutil.rmtree(self._scratch(name), ignore_errors=True)
        return Outcome(name, status, seconds=seconds, reasons=running.reasons)

    def _moved_ground(self, name: str, changed: list[str]) -> str:
        what = {"cmd": "dvc.yaml", "params": "params.yaml or the code", "deps": "one of its inputs"}
        parts = " and ".join(what[part] for part in changed)
        return (
            f"{parts} changed while {name} was running, so its result was not recorded. "
            "`ratchet run` makes it from what is there now; undo the change first to keep the finished result."
        )

    def _failed(self, name: str, running: Running) -> Outcome:
        process = running.process
        report = self._report(name, process)
        text = process.output()
        status = re.search(r"exited with (-?\d+)", text)
        code = int(status[1]) if status else process.poll() or 1
        kind = report.get("kind") or ("user" if status and code == 2 else "internal")
        message = report.get("message") or _last_words(text)
        if "No space left on device" in text or "Errno 28" in text:
            message = f"the disk is full. Free some space and run again; work so far is kept.\n{message}"
        elif code in (-9, 137) and not report:
            message = "its process was killed (signal 9), by a person or because memory ran out."
        elif not message:
            message = f"its process ended with status {code} and said nothing."
        if kind == "internal":
            message = f"{message}\nThe whole log: ratchet logs {name}"
        return Outcome(name, "failed", kind, message, process.seconds, running.reasons)

    def _report(self, name: str, process: StageProcess) -> dict[str, Any]:
        """What the stage process wrote about its own end, if it did so in this run."""
        path = self.root / ".ratchet" / "outcomes" / f"{name}.json"
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return report if report.get("token") == process.group.token else {}

    def _scratch(self, name: str) -> Path:
        return self.root / SCRATCH / name

    def running(self) -> list[StageProcess]:
        """Every process group of this run that may have a living member."""
        with self._mutex:
            return [*(running.process for running in self._running.values()), *self._ended]


@contextmanager
def open_session(root: Path | str) -> Iterator[Session]:
    """Take the project's run lock, clear what an earlier run left, and plan. Ends all stages on the way out."""
    root = Path(root).absolute()
    graph = load_graph(root)
    validate(root, graph)
    if not (root / ".dvc").is_dir():
        raise UserError(f"{root} is not set up for DVC, which keeps the outputs: run `dvc init` there once.")
    if dvcfiles.wants_git(root) and not any((place / ".git").exists() for place in (root, *root.parents)):
        raise UserError(
            f"{root} is no git repository, which DVC wants: run `git init` there once, "
            "or `dvc config core.no_scm true` to do without."
        )
    with run_lock(root):
        session = Session(root, graph)
        ended_well = False
        try:
            yield session
            ended_well = True
        finally:
            if not ended_well:
                session.closing.set()
            settle(session.running(), _SETTLE if ended_well else 0.0)
            end([Group(0, session.token)])  # one that was interrupted while it was being started


def _untrue_parts(entry: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Where a new dvc.lock entry differs from what went into the stage when it started."""
    recorded = {
        "cmd": entry.get("cmd"),
        "params": entry.get("params") or {},
        "deps": dvcfiles.recorded(entry, "deps"),
    }
    return [part for part in recorded if recorded[part] != expected[part]]


def _review_leftovers(root: Path) -> list[str]:
    """End what a killed run left running; take back what DVC recorded meanwhile if it is not true."""
    words = []
    notes = end_leftovers(root)
    dvcfiles.release_ended(root)
    for note in notes:
        name = note["stage"]
        if note["ended"]:
            words.append(f"{name} was still running from an interrupted run (process {note['ended']}); ended it")
        entry = dvcfiles.read_lock(root).get(name)
        if not entry or entry == note.get("previous"):
            continue
        if not _untrue_parts(entry, note["expected"]):
            shutil.rmtree(root / SCRATCH / name, ignore_errors=True)
        else:
            dvcfiles.replace_entry(root, name, note["previous"])
            dvcfiles.forget_run(root, entry, note["started"])
            words.append(f"{name} ended unwatched after its inputs had changed; its result is not used")
    return words


def _move_orphans(root: Path, orphans: list[str]) -> list[str]:
    notes = []
    for path in orphans:
        target = root / ".ratchet" / "orphans" / time.strftime("%Y%m%d-%H%M%S") / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(root / path, target)
        notes.append(f"{path} belongs to no stage any more; moved to {target.relative_to(root)}")
    return notes


def _last_words(text: str) -> str:
    """The last lines a failed process said, without what DVC says around them."""
    lines = [_REPRODUCE.sub("", line.rstrip()) for line in text.splitlines() if not NOISE.match(line)]
    own = [line for line in lines if not line.startswith("failed to run: ")]
    return "\n".join((own or lines)[-5:])
