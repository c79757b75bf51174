"""Printing the log of a stage, also while it is being written."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from flows.process import RUNNING, log_path
from pipelines.errors import UserError
from tasks.graph import load_graph

_POLL = 0.2  # seconds


def show_log(root: Path, stage: str, follow: bool) -> None:
    """Print the last run of a stage from its log; with `follow`, until the stage ends.

    Raises UserError for an unknown stage and for one that has not run here.
    """
    names = load_graph(root).resolve(stage)
    if len(names) > 1:
        raise UserError(f"`{stage}` stands for several stages; name one of {', '.join(names)}.")
    path = log_path(root, names[0])
    if not path.exists():
        raise UserError(f"{names[0]} has not run in this project, so it has no log. Start it with `ratchet run`.")
    with open(path, "rb") as stream:
        text = stream.read()
        header = f"=== {names[0]}  ".encode()
        start = max(text.rfind(b"\n" + header) + 1, 0)
        _print(text[start:])
        while follow:
            is_running = (root / RUNNING / f"{names[0]}.json").exists()
            fresh = stream.read()
            _print(fresh)
            if not fresh and not is_running:
                return
            time.sleep(_POLL)


def _print(data: bytes) -> None:
    sys.stdout.write(data.decode("utf-8", "replace"))
    sys.stdout.flush()
