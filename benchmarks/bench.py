"""The figures of the README: two default runs from scratch, timed, compared byte for byte, and what they learned.

Then sampling and training against the peers, and what checkpoints cost (benchmarks/peers.py).
`python -m benchmarks.bench [pipeline] [peers] [checkpoints]` puts a table into README.md between its markers and writes
benchmarks/results.json:
`{NAME: {"value", "unit", "against", "ratio", "target", "met", "part"}}`; `against` names what `ratio` compares the
value with, or is null.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks import TURNS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
RATCHET = [str(Path(sys.executable).with_name("ratchet"))]
REPEATS = 9


def main(parts: list[str]) -> None:
    """Measure `parts` of PARTS, all of them when none is named; the figures of the others stay as they are."""
    results: dict[str, dict[str, Any]] = {}
    for name in parts or PARTS:
        found = {figure: value | {"part": name} for figure, value in PARTS[name]().items()}
        results = publish(found, name)
    print(markdown(results))
    if not all(result["met"] for result in results.values()):
        print("Not every target was met: see the table.")


def publish(found: dict[str, dict[str, Any]], part: str) -> dict[str, dict[str, Any]]:
    """Put the figures of one part in place of its earlier ones, in results.json and README.md; returns all of them."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = {figure: value for figure, value in results.items() if value["part"] != part} | found
    results = dict(sorted(results.items(), key=lambda item: list(PARTS).index(item[1]["part"])))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    readme.write_text(before + BEGIN + "\n" + markdown(results) + END + rest.partition(END)[2])
    return results


def pipeline_figures() -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        results: dict[str, dict[str, Any]] = {}
        timed = []
        for project in (first, second):
            fresh_copy(project)
        for project in (first, second):
            print(f"default run in a fresh copy ({project.name})", flush=True)
            timed.append(watched(project, "run"))
        results |= run_figures(first, timed)
        results |= command_figures(first)
        results |= byte_figures(first, second)
        results |= learning_figures(first)
    return results


def fresh_copy(project: Path) -> None:
    """A clone of what git knows of the working tree, uncommitted changes included, and nothing else."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, project / name)
    for stale in ("dvc.lock", "code.lock"):
        (project / stale).unlink(missing_ok=True)
    identity = ["-c", "user.name=bench", "-c", "user.email=bench@example.invalid"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "a fresh clone"]):
        subprocess.run(["git", *command], cwd=project, check=True)


def environment(project: Path) -> dict[str, str]:
    """The project's own packages first, so that the copy is what runs."""
    return os.environ | {"PYTHONPATH": str(project), "PYTHONHASHSEED": "0", "DO_NOT_TRACK": "true"}


def watched(project: Path, *arguments: str) -> tuple[float, float]:
    """Run `ratchet` to its end; returns wall seconds and the peak memory of its process tree in GiB.

    Memory is the proportional set size (shared pages counted once), summed over the tree, every half second.
    """
    peak = 0.0
    began = time.perf_counter()
    process = subprocess.Popen([*RATCHET, *arguments], cwd=project, env=environment(project))
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.5):
            peak = max(peak, tree_memory(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    ended.set()
    watcher.join()
    if code:
        sys.exit(f"`ratchet {' '.join(arguments)}` ended with {code} in {project}")
    return time.perf_counter() - began, peak


def tree_memory(pid: int) -> float:
    """GiB of proportional set size of a process and all its descendants."""
    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended between being listed and being read
    return total / 2**30


def run_figures(project: Path, timed: list[tuple[float, float]]) -> dict[str, dict[str, Any]]:
    seconds = statistics.median(seconds for seconds, _ in timed)
    outcomes = [json.loads(path.read_text()) for path in (project / ".ratchet" / "outcomes").glob("*.json")]
    startup = sum(outcome["startup_seconds"] for outcome in outcomes) / sum(outcome["seconds"] for outcome in outcomes)
    return {
        "default run": result(seconds, "s", 480, at_most),
        "default run, start-up share of the stages' time": result(startup, "share", None, None),
        "default run, peak memory": result(max(peak for _, peak in timed), "GiB", 3, at_most),
    }


def command_figures(project: Path) -> dict[str, dict[str, Any]]:
    python = median_seconds(project, [sys.executable, "-c", "pass"])
    plan = median_seconds(project, [*RATCHET, "plan"])
    idle = median_seconds(project, [*RATCHET, "run"])
    return {
        "ratchet plan": result(plan, "s", 0.6, at_most, "an empty Python process", python),
        "ratchet run with nothing to do": result(idle, "s", 1.0, at_most, "an empty Python process", python),
    }


def median_seconds(project: Path, command: list[str]) -> float:
    seconds = []
    for _ in range(REPEATS + 1):  # the first one warms the file cache
        began = time.perf_counter()
        subprocess.run(command, cwd=project, env=environment(project), check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def byte_figures(first: Path, second: Path) -> dict[str, dict[str, Any]]:
    one, other = digests(first), digests(second)
    equal = sum(other.get(name) == digest for name, digest in one.items())
    differing = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    if differing:
        print("files that differ between two equal runs:", *differing, sep="\n  ")
    found = result(equal, "files", len(one.keys() | other.keys()), at_least, "files of two equal runs", len(one))
    return {"files equal in two runs from scratch": found}


def digests(project: Path) -> dict[str, str]:
    """SHA-256 of every output file."""
    outputs = project / "data"
    skipped = {"raw", "lineage"}
    files = [p for p in sorted(outputs.rglob("*")) if p.is_file() and p.relative_to(outputs).parts[0] not in skipped]
    return {str(path.relative_to(outputs)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def learning_figures(project: Path) -> dict[str, dict[str, Any]]:
    metrics = json.loads((project / "data/evaluate/metrics.json").read_text())
    checkpoints = metrics["checkpoints"]
    last = [name for name in checkpoints if name.startswith("rl@")][-1]
    sft, rl, student = (100 * checkpoints[name]["accuracy"]["mean"] for name in ("sft", last, "student"))
    gain = next(c for c in metrics["comparisons"] if {c["a"], c["b"]} == {last, "sft"})
    sign = 1 if gain["a"] == last else -1
    low = 100 * min(sign * gain["difference"]["low"], sign * gain["difference"]["high"])
    families = [100 * sign * family["difference"]["mean"] for family in gain["families"].values()]
    reward = json.loads((project / "data/reward/metrics.json").read_text())
    sizes = {name: checkpoints[name]["parameters"] for name in (last, "student")}
    found = {
        "accuracy of base": result(100 * checkpoints["base"]["accuracy"]["mean"], "%", None, None),
        "accuracy of sft": result(sft, "%", None, None),
        f"accuracy of {last}": result(rl, "%", None, None, "sft", sft),
        f"gain of {last} over sft": result(rl - sft, "points", 30, at_least),
        "gain, low end of its 95% interval": result(low, "points", 20, at_least),
        "gain in the family with the least": result(min(families), "points", 10, at_least),
        "accuracy of the student": result(student, "%", rl - 5, at_least, last, rl),
        "parameters of the student": result(sizes["student"], "", sizes[last] / 2, at_most, last, sizes[last]),
        "reward model on held-out pairs": result(100 * reward["heldout_pair_accuracy"], "%", 80, at_least),
    }
    return found


PEERS = {  # comparison -> the peer, the least ratio per row, and where the peer is installed
    "generation": ("transformers generate", {"256 prompts, 5M": 2.0, None: 2.3}, ".venv"),
    "vllm": ("vLLM 0.32 on the CPU", {None: 3.0}, ".venv-vllm"),
    "grpo": ("TRL 1.16 GRPOTrainer", {None: 1.9}, ".venv"),
    "sft": ("TRL 1.16 SFTTrainer, packed", {None: 1.3}, ".venv"),
}


def peer_figures() -> dict[str, dict[str, Any]]:
    """Tokens a second against the peers: medians of turns, and the median of the turns' ratios."""
    found = {}
    for name, (peer, least, folder) in PEERS.items():
        for row, rates in compare(name, folder).items():
            figure = result(rates["ours"], "tokens/s", None, None, f"{peer}: {shown(rates['theirs'])}", rates["theirs"])
            target = least.get(row, least[None])
            spread = [rates["lowest"], rates["highest"]]
            figure |= {"ratio": rates["ratio"], "spread": spread, "target": f"ratio at least {target:g}"}
            found[f"{name}: {row}"] = figure | {"met": rates["ratio"] >= target}
    return found


def checkpoint_figures() -> dict[str, dict[str, Any]]:
    """What checkpoints and a resume cost, as a share of the time without them: median of turns."""
    found = {name: 100 * share for name, share in compare("checkpoints", ".venv").items()}
    spread = f"the same run without them ({shown(found['lowest'])} to {shown(found['highest'])} %)"
    return {"four checkpoints and a resume": result(found["share"], "% of the time", 3, at_most, spread)}


def compare(name: str, folder: str) -> dict[str, Any]:
    python = str(ROOT / folder / "bin/python") if (ROOT / folder).is_dir() else sys.executable
    print(f"comparison: {name}", flush=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / ".bench/trl")])}
    done = subprocess.run(
        [python, "-m", "benchmarks.peers", name], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"the comparison `{name}` ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def at_most(value: float, target: float) -> bool:
    return value <= target


def at_least(value: float, target: float) -> bool:
    return value >= target


def result(
    value: float,
    unit: str,
    target: float | None,
    judge: Callable[[float, float], bool] | None,
    against: str | None = None,
    reference: float | None = None,
) -> dict[str, Any]:
    """One figure. Without a target it is only reported and counts as met."""
    ratio = value / reference if reference else None
    met = judge(value, target) if judge else True
    sense = {at_most: "at most", at_least: "at least", None: None}[judge]
    target_text = None if target is None else f"{sense} {shown(target)} {unit}".rstrip()
    return {"value": value, "unit": unit, "against": against, "ratio": ratio, "target": target_text, "met": met}


def shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(results: dict[str, dict[str, Any]]) -> str:
    lines = ["| figure | value | against | ratio | target | met |", "|---|---:|---|---:|---|---|"]
    for name, found in results.items():
        ratio = "" if found["ratio"] is None else f"{found['ratio']:.2f}"
        ratio += " ({:.2f} to {:.2f})".format(*found["spread"]) if "spread" in found else ""
        met = "" if found["target"] is None else ("yes" if found["met"] else "**no**")
        value = f"{shown(found['value'])} {found['unit']}".rstrip()
        lines.append(f"| {name} | {value} | {found['against'] or ''} | {ratio} | {found['target'] or ''} | {met} |")
    lines.append("")
    lines.append(
        f"Default run: median of two from scratch on {os.cpu_count()} CPU cores; commands: median of {REPEATS}. "
        f"Against peers: by turns in one process with two threads, medians of {TURNS} turns; the ratio is the median "
        "of the turns' ratios, with the lowest and the highest. docs/speed.md says what bounds them."
    )
    return "\n".join(lines) + "\n"


PARTS = {"pipeline": pipeline_figures, "peers": peer_figures, "checkpoints": checkpoint_figures}

if __name__ == "__main__":
    main(sys.argv[1:])
