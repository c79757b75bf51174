"""What a run prints at its end: accuracies, sizes, times, where the checkpoint is, and what to try next."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from flows.display import duration
from flows.driver import Result
from flows.plan import FRESH, make_plan
from tasks.graph import Graph, Node, load_graph

METRICS = "data/evaluate/metrics.json"


def print_result(root: Path, result: Result) -> None:
    """Failures to stderr; else one line when nothing was to do, or the table of checkpoints."""
    for outcome in result.outcomes:
        if outcome.status == "failed":
            print(f"ratchet: stage {outcome.name} failed: {outcome.message}", file=sys.stderr)
    waiting = [outcome.name for outcome in result.outcomes if outcome.status == "blocked"]
    if waiting:
        print(f"ratchet: not started because of that: {', '.join(waiting)}.", file=sys.stderr)
    if result.failures:
        return
    ran = [outcome for outcome in result.outcomes if outcome.status != "skipped"]
    if not ran:
        print(f"Nothing to do: {len(result.outcomes)} stages are up to date.")
        return
    print(closing_text(root, result))


def closing_text(root: Path, result: Result) -> str:
    """The table, the path of the final checkpoint and the next two commands; plain text."""
    graph = load_graph(root)
    states = {state.name: state.state for state in make_plan(root, refresh=False)}
    stale = [name for name in graph.nodes if states[name] != FRESH]
    seconds = {outcome.name: outcome.seconds for outcome in result.outcomes if outcome.status == "done"}
    evaluation = graph.producer(METRICS)
    is_current = evaluation is None or states[evaluation.name] == FRESH
    titles = [
        "stage",
        "accuracy (95% interval)" if is_current else "accuracy when last evaluated",
        "parameters",
        "time",
    ]
    rows = table_rows(root, graph, seconds)
    if stale:
        titles.append("now")
        rows = [[*row, states[row[0]]] for row in rows]
    lines = ["", *_columns(titles, rows), "", f"{_counts(result)} in {duration(result.seconds)}."]
    final = final_checkpoint(root, graph)
    if stale:
        lines.append(f"Not up to date: {', '.join(stale)}. `ratchet plan` says why, `ratchet run` mends it.")
    elif final:
        lines += [f"Final checkpoint: {final}", "Try next:", f"  ratchet generate {final}", f"  ratchet audit {final}"]
    return "\n".join(lines)


def table_rows(root: Path, graph: Graph, seconds: dict[str, float]) -> list[list[str]]:
    """Stage, accuracy with its interval, parameter count, seconds of its last execution."""
    checkpoints = _accuracies(root)
    rows = []
    for node in graph.nodes.values():
        accuracy = checkpoints.get(checkpoint_name(node))
        took = seconds.get(node.name) or _last_seconds(root, node.name)
        size = parameter_count(root / node.outs[0]) if node.outs else None
        rows.append(
            [
                node.name,
                f"{accuracy['mean']:.3f}  ({accuracy['low']:.3f} to {accuracy['high']:.3f})" if accuracy else "",
                f"{size / 1e6:.2f} M" if size else "",
                duration(took) if took else "",
            ]
        )
    return rows


def checkpoint_name(node: Node) -> str:
    """What data/evaluate/metrics.json calls the checkpoint of a stage."""
    return "student" if node.name == "distill" else node.name


def final_checkpoint(root: Path, graph: Graph) -> str:
    """The last output in the order of the graph that holds a language model of the evaluated ones."""
    known = _accuracies(root)
    found = [node.outs[0] for node in graph.nodes.values() if node.outs and checkpoint_name(node) in known]
    return found[-1] if found else ""


def parameter_count(directory: Path) -> int | None:
    """Parameters of a checkpoint, from the headers of its safetensors files; None without any."""
    count = 0
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for dimension in tensor["shape"]:
                    size *= dimension
                count += size
    return count or None


def _accuracies(root: Path) -> dict[str, dict[str, float]]:
    path = root / METRICS
    if not path.is_file():
        return {}
    checkpoints = json.loads(path.read_text(encoding="utf-8")).get("checkpoints", {})
    return {name: entry["accuracy"] for name, entry in checkpoints.items()}


def _last_seconds(root: Path, stage: str) -> float | None:
    path = root / ".ratchet" / "outcomes" / f"{stage}.json"
    if not path.is_file():
        return None
    outcome: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return outcome.get("seconds") if outcome.get("status") == "succeeded" else None


def _counts(result: Result) -> str:
    words = {"done": "ran", "republished": "ran", "restored": "came from the cache", "skipped": "were up to date"}
    counts: dict[str, int] = {}
    for outcome in result.outcomes:
        word = words[outcome.status]
        counts[word] = counts.get(word, 0) + 1
    return ", ".join(
        f"{count} stages {word}" if count != 1 else f"1 stage {word.replace('were', 'was')}"
        for word, count in counts.items()
    )


def _columns(titles: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [titles, *rows]
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
