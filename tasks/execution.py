"""What a stage's code sees of its execution: parameters, inputs, scratch space, output, where to report."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from pipelines.errors import UserError
from pipelines.generation.settings import EngineParams
from tasks import digests
from tasks.graph import Node
from tasks.recording import Recorder
from tasks.settings import Settings
from tasks.yamlfile import write_atomically

_PROGRESS_EVERY = 0.2  # seconds between two writes of the progress file
_PRINT_EVERY = 5.0  # seconds between two progress lines in the log
_SHOWN = 4  # metrics of a step that fit a line; all of them go to MLflow


class Execution:
    """One execution of one stage. Paths are relative to the project root, which is the working directory."""

    def __init__(
        self,
        node: Node,
        settings: Settings,
        scratch: Path,
        recorder: Recorder | None = None,
        is_resumed: bool = False,
    ) -> None:
        self.node, self.settings, self.scratch, self.is_resumed = node, settings, scratch, is_resumed
        self.name, self.group, self.key = node.name, node.group, node.key
        self.seed, self.threads = settings.seed, settings.threads
        self.params: Any = settings.section(node.group)
        self.output = scratch / "output"
        self.rows: dict[str, int] = {}
        self.results: dict[str, float] = {}
        self.sources: list[dict[str, Any]] = []
        self.first_progress: float | None = None
        self._recorder = recorder
        self._progress_path = Path(".ratchet/progress") / f"{node.name}.json"
        self._progress_path.unlink(missing_ok=True)  # what an earlier execution said is not true of this one
        self._written = self._printed = 0.0

    @property
    def engine(self) -> EngineParams:
        """What samples, for the stages that declare it."""
        return self.settings.engine

    def input(self, directory: str) -> Path:
        """The path of a declared input, or of something inside one. Raises UserError for anything else."""
        wanted = directory.rstrip("/")
        if not any(wanted == dep or wanted.startswith(f"{dep}/") for dep in self.node.deps):
            raise UserError(
                f"dvc.yaml: stage {self.name} reads {wanted} without declaring it; add it to the deps of the "
                f"stage (declared: {', '.join(self.node.deps) or 'none'})"
            )
        return Path(wanted)

    def progress(self, done: int, total: int, unit: str = "steps", note: str = "", **metrics: float) -> None:
        """Say how far the stage is: shown live, up to five times a second, and in the log now and then."""
        moment = time.time()
        if self.first_progress is None:
            self.first_progress = moment
        finished = done >= total
        if finished or moment - self._written >= _PROGRESS_EVERY:
            self._written = moment
            shown = {name: float(value) for name, value in metrics.items()}
            content = {
                "stage": self.name,
                "done": done,
                "total": total,
                "unit": unit,
                "note": note,
                "metrics": {name: value if math.isfinite(value) else None for name, value in shown.items()},
                "updated": moment,
            }
            write_atomically(self._progress_path, json.dumps(content))
        if finished or moment - self._printed >= _PRINT_EVERY:
            self._printed = moment
            figures = "  ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())
            print(
                "  ".join(part for part in (f"{self.name}: {done}/{total} {unit}", figures, note) if part),
                flush=True,
            )

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Note metrics of a step. They go to MLflow in batches; nothing waits for it."""
        if self._recorder:
            self._recorder.metrics(step, values)

    def report(self, done: int, total: int, metrics: Mapping[str, float]) -> None:
        """Progress and metrics of one optimiser step, the form in which the training loop tells of it."""
        self.log_metrics(done, metrics)
        self.progress(done, total, **dict(islice(metrics.items(), _SHOWN)))

    def log_rows(self, name: str, count: int) -> None:
        """Note how many rows a table of the output has, for the lineage record."""
        self.rows[name] = int(count)

    def log_result(self, values: Mapping[str, float]) -> None:
        """Note final figures of the stage, for the lineage record and MLflow."""
        self.results |= {name: float(value) for name, value in values.items()}

    def write_metrics(self, values: Mapping[str, Any]) -> None:
        """Write `metrics.json` of the output; its numbers are also noted as the stage's results."""
        text = json.dumps(values, indent=1, sort_keys=True, allow_nan=False)
        (self.output / "metrics.json").write_text(text + "\n", encoding="utf-8")
        self.log_result({name: value for name, value in values.items() if isinstance(value, int | float)})

    def log_source(self, name: str, path: Path | str | None = None, digest: Mapping[str, str] | None = None) -> None:
        """Note something read from outside the project, for the lineage record.

        `name` is a path, URI or hub id. It comes with the file or directory at `path`, which is digested
        here, or with a digest that is already known, such as `{"gitCommit": revision}`.
        """
        known = dict(digest or {})
        if path is not None:
            known["sha256"] = digests.tree_sha256(Path(path))
        self.sources.append({"name": str(name), "digest": known})


class Silent(Execution):
    """The execution of a stage as the processes beside its first one see it: nothing they say or write is kept."""

    def progress(self, *arguments: Any, **metrics: float) -> None:
        """The first process says it."""
