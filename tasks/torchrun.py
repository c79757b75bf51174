"""Stages in several processes: `python -m tasks.NAME` starts itself under `torchrun` when params.yaml asks for it.

The first process is the stage, with its lock, its records and its output. The others (`follow`) run the same compute
function for the sake of the training in it, write nothing and end with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pipelines.errors import UserError
from tasks import graph, settings
from tasks.execution import Execution, Silent
from tasks.outcome import OUTCOMES

_STARTED = "RATCHET_TORCHRUN"  # in the environment of the processes that `launch` makes
_PARAMETER = "distributed"
_GRACE = 20.0  # seconds


def wanted(root: Path, stage: str) -> int:
    """How many processes the stage is to run in; 1 also when that cannot be read, which the stage itself will say."""
    with suppress(UserError):
        node = graph.load_graph(root).nodes.get(stage)
        if node is not None and _PARAMETER in node.params.get(settings.PARAMS, ()):
            return settings.load_params(root, only=[_PARAMETER]).distributed.processes
    return 1


def is_started() -> bool:
    """Whether this process was made by `launch`."""
    return _STARTED in os.environ


def is_follower() -> bool:
    return is_started() and os.environ["RANK"] != "0"


def launch(module: str, stage: str, processes: int, arguments: list[str]) -> NoReturn:
    """Run `python -m MODULE` in several processes, and end with the exit code of the first."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, _STARTED: "1"}  # each process sets its own number
    outcome = OUTCOMES / f"{stage}.json"
    before = _changed(outcome)
    child = subprocess.Popen([*command, "-m", module, *arguments], env=environment)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: child.send_signal(number))
    code = child.wait()
    code = 128 - code if code < 0 else code  # ended by a signal, as a shell says it
    if code and _changed(outcome) != before:  # `torchrun` itself ends with 1 whatever it was
        with suppress(OSError, ValueError, KeyError):
            code = json.loads(outcome.read_text(encoding="utf-8"))["exit_code"] or code
    sys.exit(code)


def _changed(path: Path) -> int | None:
    """When the file was written, in nanoseconds; None where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def lead(scratch: Path | None) -> None:
    """In the first process: meet the others and tell them where to work; None sends them home."""
    if is_started():
        from torch.distributed import broadcast_object_list, destroy_process_group

        from pipelines.training.team import gather_team

        gather_team()
        broadcast_object_list([None if scratch is None else str(scratch)], src=0)
        if scratch is None:
            destroy_process_group()  # a process that ends with its connections open is aborted now and then


def follow(compute: Callable[[Execution], None], root: Path, stage: str) -> None:
    """In every other process: the training part of `compute`."""
    from torch.distributed import broadcast_object_list, destroy_process_group

    from pipelines.training.team import Dismissed, gather_team

    node = graph.load_graph(root).nodes[stage]
    checked = settings.load_params(root, only=node.params.get(settings.PARAMS, ()))
    gather_team()
    told: list[Any] = [None]
    broadcast_object_list(told, src=0)
    if told[0] is None:
        destroy_process_group()
        return
    try:
        compute(Silent(node, checked, Path(told[0])))
    except Dismissed:
        return
    except BaseException as error:
        if isinstance(error, UserError):
            print(f"process {os.environ['RANK']}: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        time.sleep(_GRACE)  # the first process meets the same fault and is to say it, before `torchrun` ends all
        sys.exit(1)
