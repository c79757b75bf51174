"""A small project with cheap stages that runs the real contract in real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

NO_SERVER = "http://127.0.0.1:9"
REPOSITORY = Path(__file__).resolve().parents[2]
_PIPELINES = ("errors.py", "settings.py", "registry.py", "generation/settings.py")

_STAGE = """
from __future__ import annotations

from pathlib import Path

from pydantic import Field

from pipelines.settings import Strict
from tasks.contract import Execution, main


class Params(Strict):
    {params}


def compute(stage: Execution) -> None:
{body}


if __name__ == "__main__":
    main(compute)
"""


class Project:
    """A project directory; `run` is what DVC would run."""

    def __init__(self, root: Path, copied: bool = False) -> None:
        self.root = root
        if copied:
            return
        shutil.copytree(
            REPOSITORY / "tasks", root / "tasks", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
        )
        (root / "pipelines" / "generation").mkdir(parents=True)
        for name in _PIPELINES:
            shutil.copy(REPOSITORY / "pipelines" / name, root / "pipelines" / name)

    def stage(self, name: str, body: str, params: str = "size: int = Field(ge=1)") -> None:
        text = _STAGE.format(params=params, body=textwrap.indent(textwrap.dedent(body).strip(), "    "))
        (self.root / "tasks" / f"{name}.py").write_text(text)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(textwrap.dedent(text).lstrip())

    def refresh(self) -> None:
        """What `ratchet plan` does first."""
        from tasks import codelock
        from tasks.graph import load_graph

        codelock.refresh(self.root, load_graph(self.root))

    def environment(self, **extra: str) -> dict[str, str]:
        """Without a tracking server, which saves 2 s a stage; MLFLOW_TRACKING_URI="" asks for the default one."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "RATCHET_", "GIT_"))}
        return {**kept, "PYTHONHASHSEED": "0", "MLFLOW_TRACKING_URI": NO_SERVER, **extra}

    def start(self, *command: str, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", f"tasks.{command[0]}", *command[1:]],
            cwd=self.root,
            env=self.environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, **extra: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*command, **extra)
        out, err = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run_all(self, **extra: str) -> None:
        for command in (["corpus"], ["model"], ["tuned", "1"], ["tuned", "2"], ["report"]):
            done = self.run(*command, **extra)
            assert done.returncode == 0, done.stderr

    def outcome(self, stage: str) -> dict[str, Any]:
        return json.loads((self.root / f".ratchet/outcomes/{stage}.json").read_text())

    def records(self) -> list[dict[str, Any]]:
        lines = (self.root / "data/lineage/log.jsonl").read_text().splitlines()
        return [json.loads(line)["statement"] for line in lines]


def make_project(root: Path) -> Project:
    """Stages: corpus (from data/raw) -> model (a checkpoint) -> tuned@1 -> tuned@2 -> report (reads data/tuned)."""
    made = Project(root)
    made.write("data/raw/words.txt", "one\ntwo\nthree\n")
    made.stage(
        "corpus",
        """
        words = stage.input("data/raw").joinpath("words.txt").read_text().split()
        (stage.output / "words.txt").write_text("\\n".join(words[: stage.params.size]))
        stage.log_rows("words", min(len(words), stage.params.size))
        """,
    )
    model = """
        import json
        words = stage.input("data/corpus").joinpath("words.txt").read_text()
        for step in range(stage.params.size):
            stage.report(step + 1, stage.params.size, {"loss": 1 / (step + 1)})
        (stage.output / "config.json").write_text(json.dumps({"seed": stage.seed, "size": stage.params.size}))
        (stage.output / "model.safetensors").write_bytes(words.encode() * stage.params.size)
        stage.write_metrics({"loss": 1 / stage.params.size})
        """
    made.stage("model", model)
    made.stage(
        "tuned",
        """
        start = stage.input(stage.settings.rounds[stage.key].init)
        (stage.output / "config.json").write_bytes((start / "config.json").read_bytes())
        weights = (start / "model.safetensors").read_bytes() + stage.key.encode()
        (stage.output / "model.safetensors").write_bytes(weights)
        """,
    )
    made.stage(
        "report",
        """
        names = sorted(path.name for path in stage.input("data/tuned").iterdir())
        (stage.output / "metrics.json").write_text(str(len(names)))
        """,
    )
    made.write(
        "params.yaml",
        """
        seed: 7
        threads: 1
        rounds:
          "1": {init: data/model}
          "2": {init: data/tuned/1}
        corpus: {size: 3}
        model: {size: 4}
        tuned: {size: 1}
        report: {size: 1}
        """,
    )
    made.write(
        "dvc.yaml",
        """
        stages:
          corpus:
            cmd: python -m tasks.corpus
            deps: [data/raw]
            params: [seed, threads, corpus, {code.lock: [corpus]}]
            outs: [data/corpus]
          model:
            cmd: python -m tasks.model
            deps: [data/corpus]
            params: [seed, threads, model, {code.lock: [model]}]
            outs: [data/model]
          tuned:
            foreach: ${rounds}
            do:
              cmd: python -m tasks.tuned ${key}
              deps: ["${item.init}"]
              params: [seed, threads, tuned, "rounds.${key}", {code.lock: [tuned]}]
              outs: ["data/tuned/${key}"]
          report:
            cmd: python -m tasks.report
            deps: [data/tuned]
            params: [seed, threads, report, rounds, {code.lock: [report]}]
            outs: [data/report]
        """,
    )
    made.refresh()
    return made
