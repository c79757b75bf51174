"""Running stages on this machine: what is ready starts, what is fresh is skipped, what failed stops what is below."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from flows.process import StageProcess
from flows.session import Outcome, Running, Session, open_session

_POLL = 0.05  # seconds between two looks at the running stages


class Display(Protocol):
    """What a run tells a person while it goes on."""

    def begin(self, session: Session, stages: list[str]) -> None: ...

    def note(self, text: str) -> None: ...

    def started(self, name: str, reasons: list[str]) -> None: ...

    def line(self, name: str, text: str) -> None: ...

    def tick(self) -> None: ...

    def finished(self, outcome: Outcome) -> None: ...

    def close(self) -> None: ...


@dataclass
class Result:
    """What came of a run: one outcome per selected stage, in topological order."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]

    @property
    def exit_code(self) -> int:
        """0 when all went well, 2 when only mistakes a person can mend are in the way, 1 otherwise."""
        if not self.failures:
            return 0
        return 2 if all(outcome.kind == "user" for outcome in self.failures) else 1


def run(
    root: Path | str,
    names: Collection[str],
    upstream: bool,
    downstream: bool,
    force: bool,
    display: Display,
) -> Result:
    """Run what is stale among the selected stages; every stage when none is named.

    Stages with no path between them run at the same time. A stage is judged when everything above it has ended,
    so one whose inputs came out equal is skipped. `force` reruns the named stages even if they are fresh.
    Raises UserError before anything runs, KeyboardInterrupt when interrupted; no stage process is left then.
    """
    begun = time.monotonic()
    with interruptible(), open_session(root) as session:
        for note in session.take_notes():
            display.note(note)
        stages = session.select(names, upstream, downstream)
        for note in session.take_notes():
            display.note(note)
        forced = session.forced(names, stages) if force else set()
        display.begin(session, stages)
        try:
            outcomes = _loop(session, stages, forced, display)
        finally:
            display.close()
    return Result([outcomes[name] for name in stages], time.monotonic() - begun)


def _loop(session: Session, stages: list[str], forced: set[str], display: Display) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    running: dict[str, Running] = {}

    def settle(outcome: Outcome) -> None:
        outcomes[outcome.name] = outcome
        display.finished(outcome)

    while len(outcomes) < len(stages):
        for name in stages:
            if name in outcomes or name in running:
                continue
            above = [n for n in session.graph.ancestors(name) if n in stages]
            if not all(n in outcomes for n in above):
                continue
            broken = [n for n in above if not outcomes[n].is_good]
            if broken:
                settle(blocked(name, broken))
                continue
            started = session.start(name, name in forced)
            if started is None:
                settle(Outcome(name, "skipped"))
            else:
                running[name] = started
                display.started(name, started.reasons)
        for name, stage in list(running.items()):
            if follow(stage.process, lambda text, name=name: display.line(name, text)):
                del running[name]
                settle(session.finish(name))
        display.tick()
        if running:
            time.sleep(_POLL)
    return outcomes


def follow(process: StageProcess, say: Callable[[str], None]) -> bool:
    """Pass on what a stage has said since the last call; True when it has ended and all is said."""
    ended = process.poll() is not None
    for text in process.lines():
        say(text)
    return ended


def blocked(name: str, broken: list[str]) -> Outcome:
    """The outcome of a stage that was not started because of failures above it."""
    return Outcome(name, "blocked", message=f"not started: {', '.join(broken)} did not succeed")


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into KeyboardInterrupt; once one came, further ones do not disturb the ending."""

    def interrupt(number: int, _frame: object) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
