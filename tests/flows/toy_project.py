"""A toy project: nine cheap stages shaped like the real ones, in a git and DVC repository of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]

WORK = '''
"""python work.py NAME OUT [INPUT ...]: writes what it was given, and misbehaves as params.yaml asks."""
import json, os, signal, subprocess, sys, time
from pathlib import Path

import yaml

name, out, *inputs = sys.argv[1:]
params = yaml.safe_load(Path("params.yaml").read_text())
mine = params.get(name) or {}
how = json.loads(os.environ.get("TOY", "{}")).get(name, {})
with open(f"calls.{name}", "a") as calls:
    calls.write(f"{time.time()}\\n")
if how.get("stubborn"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c",
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "open('grandchild.pid', 'w').write(str(os.getpid())); time.sleep(120)"])
    Path("child.pid").write_text(str(os.getpid()))
time.sleep(how.get("sleep", 0))
print(f"{name} says hello", flush=True)
if "print" in how:
    print(how["print"], flush=True)
if how.get("die"):
    os.kill(os.getpid(), signal.SIGKILL)
if "exit" in how:
    Path(out).mkdir(parents=True, exist_ok=True)
    Path(out, "half").write_text("written")
    print("the reason for it", file=sys.stderr)
    sys.exit(how["exit"])
for step in range(how.get("steps", 0)):
    Path(".ratchet/progress").mkdir(parents=True, exist_ok=True)
    time.sleep(0.05)
Path(out).mkdir(parents=True, exist_ok=True)
content = sorted(str(p) + p.read_text() for i in inputs for p in Path(i).rglob("*") if p.is_file())
keep = mine.get("value", 0) if isinstance(mine, dict) else mine
Path(out, "value.json").write_text(json.dumps([name, keep, content if keep != "constant" else "constant"]))
'''

DVC_YAML = """
stages:
  base:
    cmd: python work.py base data/base
    params: [seed, base]
    outs: [data/base]
  synthesize:
    cmd: python work.py synthesize data/synthesize data/raw
    deps: [data/raw]
    params: [seed, synthesize]
    outs: [data/synthesize]
  sft:
    cmd: python work.py sft data/sft data/base data/synthesize
    deps: [data/base, data/synthesize]
    params: [seed, sft]
    outs: [data/sft]
  filter:
    cmd: python work.py filter data/filter data/sft
    deps: [data/sft, data/synthesize]
    params: [filter]
    outs: [data/filter]
  reward:
    cmd: python work.py reward data/reward data/sft
    deps: [data/sft]
    params: [reward]
    outs: [data/reward]
  rl:
    foreach: ${rounds}
    do:
      cmd: python work.py rl data/rl/${key} ${item.init} data/filter data/reward
      deps: ['${item.init}', data/filter, data/reward]
      params: [seed, rl, 'rounds.${key}']
      outs: ['data/rl/${key}']
  distill:
    cmd: python work.py distill data/distill data/rl/2
    deps: [data/rl/2]
    params: [distill]
    outs: [data/distill]
  evaluate:
    cmd: python work.py evaluate data/evaluate data/rl data/distill data/base
    deps: [data/rl, data/distill, data/base]
    params: [evaluate]
    outs: [data/evaluate]
"""

PARAMS = """
seed: 1
base: {value: 1}
synthesize: {value: 1}
sft: {value: 1, lr: 1e-3}
filter: {value: 1}
reward: {value: 1}
rounds:
  "1": {init: data/sft}
  "2": {init: data/rl/1}
rl: {value: 1, lr: 2e-4, clip: {low: 0.2, high: 0.28}}
distill: {value: 1}
evaluate: {value: 1}
"""

STAGES = ["base", "synthesize", "sft", "filter", "reward", "rl@1", "rl@2", "distill", "evaluate"]


class Toy:
    """A toy project and the ways tests change and run it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def set(self, key: str, value: object) -> None:
        path = self.root / "params.yaml"
        params = yaml.safe_load(path.read_text())
        *parts, last = key.split(".")
        inner = params
        for part in parts:
            inner = inner[part]
        inner[last] = value
        path.write_text(yaml.safe_dump(params))

    def environment(self, **toy: dict[str, object]) -> dict[str, str]:
        return {**os.environ, "TOY": json.dumps(toy), "PYTHONPATH": str(REPOSITORY)}

    def ratchet(
        self, *arguments: str, check: int | None = 0, **toy: dict[str, object]
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line in a process of its own; `toy` says how stages misbehave."""
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments],
            cwd=self.root,
            env=self.environment(**toy),
            capture_output=True,
            text=True,
            timeout=120,
        )
        if check is not None:
            assert done.returncode == check, done.stdout + done.stderr
        return done

    def start(self, *arguments: str, **toy: dict[str, object]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", *arguments],
            cwd=self.root,
            env=self.environment(**toy),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def calls(self, name: str) -> int:
        path = self.root / f"calls.{name}"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def total_calls(self) -> dict[str, int]:
        return {
            p.name.removeprefix("calls."): self.calls(p.name.removeprefix("calls.")) for p in self.root.glob("calls.*")
        }

    def states(self) -> dict[str, str]:
        from flows.plan import make_plan

        return {s.name: s.state for s in make_plan(self.root)}

    def reasons(self, name: str) -> list[str]:
        from flows.plan import make_plan

        return next(s.reasons for s in make_plan(self.root) if s.name == name)


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
