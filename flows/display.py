"""What a person sees while stages run: live bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from flows.driver import Display
from flows.session import Outcome, Session

_PLAIN_EVERY = 10.0  # seconds between two progress lines of a stage in plain output
_SHOWN_METRICS = 3


def make_display(plain: bool = False) -> Display:
    """The live display on a terminal, plain lines when output is redirected or `plain` is asked for."""
    return LiveDisplay() if sys.stdout.isatty() and not plain else PlainDisplay()


def read_progress(root: Path, stage: str, since: float) -> dict[str, Any]:
    """What a stage last said of its progress in this run; empty before it said anything."""
    try:
        progress = json.loads((root / ".ratchet" / "progress" / f"{stage}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return progress if progress.get("updated", 0) >= since - 1 else {}


def duration(seconds: float) -> str:
    """3.2 s, 4:05 or 2:10:09."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary(outcome: Outcome) -> str:
    """How a stage ended, in a few words."""
    return {
        "done": f"done in {duration(outcome.seconds)}",
        "restored": f"restored from cache in {duration(outcome.seconds)}",
        "republished": f"taken from finished work in {duration(outcome.seconds)}",
        "skipped": "up to date",
        "failed": f"failed after {duration(outcome.seconds)}",
    }.get(outcome.status, outcome.message)


class Rate:
    """Work done per second, from the first and the latest sighting in this run."""

    def __init__(self) -> None:
        self.first: tuple[float, float] | None = None
        self.last: tuple[float, float] | None = None

    def see(self, done: float, moment: float) -> None:
        if self.first is None or done < self.first[0]:
            self.first = (done, moment)
        self.last = (done, moment)

    @property
    def per_second(self) -> float | None:
        if not self.first or not self.last or self.last[1] <= self.first[1] or self.last[0] <= self.first[0]:
            return None
        return (self.last[0] - self.first[0]) / (self.last[1] - self.first[1])


class _Watch:
    """Progress of the running stages, read from the files they write."""

    def __init__(self) -> None:
        self.root = Path()
        self.begun: dict[str, float] = {}
        self.rates: dict[str, Rate] = {}

    def start(self, name: str) -> None:
        self.begun[name] = time.time()
        self.rates[name] = Rate()

    def stop(self, name: str) -> None:
        self.begun.pop(name, None)

    def look(self, name: str) -> dict[str, Any]:
        progress = read_progress(self.root, name, self.begun[name])
        if progress:
            self.rates[name].see(progress["done"], progress["updated"])
        return progress

    def describe(self, name: str, progress: dict[str, Any]) -> str:
        rate = self.rates[name].per_second
        parts = [f"{progress['done']}/{progress['total']} {progress.get('unit', '')}".rstrip()]
        if rate:
            parts.append(f"{rate:.3g}/s")
            left = (progress["total"] - progress["done"]) / rate
            if left > 0:
                parts.append(f"{duration(left)} left")
        metrics = {k: v for k, v in (progress.get("metrics") or {}).items() if v is not None}
        parts += [f"{key} {value:.4g}" for key, value in list(metrics.items())[:_SHOWN_METRICS]]
        return "  ".join([*parts, *([progress["note"]] if progress.get("note") else [])])


class PlainDisplay:
    """One line per event, and one per stage every few seconds."""

    def __init__(self) -> None:
        self._watch = _Watch()
        self._printed: dict[str, float] = {}
        self._said: dict[str, str] = {}

    def begin(self, session: Session, stages: list[str]) -> None:
        self._watch.root = session.root
        due = [name for name in stages if session.plan[name].state != "fresh"]
        if due:
            self.note(f"{len(stages)} stages, {len(due)} of them not up to date")

    def note(self, text: str) -> None:
        print(text, flush=True)

    def started(self, name: str, reasons: list[str]) -> None:
        self._watch.start(name)
        self._printed[name] = time.monotonic()
        self.note(f"{name}: started ({'; '.join(reasons[:4])})")

    def line(self, name: str, text: str) -> None:
        """Stage output goes to the log only."""

    def tick(self) -> None:
        for name in list(self._watch.begun):
            if time.monotonic() - self._printed[name] >= _PLAIN_EVERY:
                self._printed[name] = time.monotonic()
                progress = self._watch.look(name)
                text = self._watch.describe(name, progress) if progress else "starting"
                if text != self._said.get(name):
                    self._said[name] = text
                    self.note(f"{name}: {text}")

    def finished(self, outcome: Outcome) -> None:
        self._watch.stop(outcome.name)
        if outcome.status != "skipped":
            self.note(f"{outcome.name}: {summary(outcome)}")

    def close(self) -> None:
        sys.stdout.flush()


class LiveDisplay:
    """A line per stage with its state, a bar, the rate, an estimate of the time left and the time gone."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._watch = _Watch()
        self._outcomes: dict[str, Outcome] = {}
        self._reasons: dict[str, list[str]] = {}
        self._stages: list[str] = []
        self._drawn = 0.0
        self._is_live = False

    def begin(self, session: Session, stages: list[str]) -> None:
        self._watch.root = session.root
        self._stages = stages
        if any(session.plan[name].state != "fresh" for name in stages):
            self._live.start()
            self._is_live = True

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def started(self, name: str, reasons: list[str]) -> None:
        self._watch.start(name)
        self._reasons[name] = reasons

    def line(self, name: str, text: str) -> None:
        """Stage output goes to the log only."""

    def tick(self) -> None:
        if self._is_live and time.monotonic() - self._drawn >= 0.25:
            self._draw()

    def finished(self, outcome: Outcome) -> None:
        self._watch.stop(outcome.name)
        self._outcomes[outcome.name] = outcome
        self._draw()

    def close(self) -> None:
        if self._is_live:
            self._draw()
            self._live.stop()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._is_live:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(width=24)
        table.add_column(no_wrap=True, justify="right")
        table.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
        for name in self._stages:
            outcome = self._outcomes.get(name)
            if outcome:
                mark, style = _MARKS[outcome.status]
                reasons = "; ".join(reason for reason in outcome.reasons if reason != "never built")
                bar, gone, text = Text(mark, style), "", f"{summary(outcome)}  {reasons}".rstrip()
            elif name in self._watch.begun:
                progress = self._watch.look(name)
                gone = duration(time.time() - self._watch.begun[name])
                if progress:
                    bar = ProgressBar(total=max(progress["total"], 1), completed=progress["done"], width=24)
                    text = self._watch.describe(name, progress)
                else:
                    bar, text = Text("starting", "cyan"), "; ".join(self._reasons[name])
            else:
                bar, gone, text = Text("waiting", "dim"), "", ""
            table.add_row(name, bar, gone, Text(text))
        return table


_MARKS = {
    "done": ("done", "green"),
    "restored": ("restored", "green"),
    "republished": ("done", "green"),
    "skipped": ("up to date", "dim"),
    "failed": ("failed", "bold red"),
    "blocked": ("not started", "yellow"),
}
