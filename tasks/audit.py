"""What a checkpoint was made of, from the lineage log and the bytes on disk; nothing else is asked.

`audit(root, target)` gives a dict, which `ratchet audit --json` prints; its shape is stable:

    target       what was asked: a stage or a directory
    path         the directory that was looked at, relative to the project if it lies inside
    stage        the stage that made it
    record       SHA-256 of its record, the key of `executions`
    state        intact | modified | missing: the bytes at `path` against the record
    differences  [{file, problem: modified | missing | added}]
    log          {path, records, head: SHA-256 of the last record, breaks: [sentence]}
    executions   {SHA-256 of a record: execution}, the target first, then what it was made from

    execution    stage, output, sha256 (of the output as a whole), files {name: SHA-256}, started, finished (UTC),
                 state (intact | modified | missing | replaced: what lies at `output` now), differences,
                 git {commit, dirty, diff_sha256, note}, code_lock (SHA-256 of the stage's entry), params, seed,
                 environment {threads, python, packages, ...}, rows, results,
                 mlflow {run_id, model_id, invocation}, resumed_from,
                 inputs [{path, sha256, stage, record, state, differences, files}]: `stage` and `record` are null
                 for raw data, whose `files` are listed; `sources` [{name, digest}]: read from elsewhere
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pipelines.errors import UserError
from tasks import digests, graph, lineage
from tasks.codelock import FILE
from tasks.lineage import Record
from tasks.recording import flatten
from tasks.settings import PARAMS
from tasks.yamlfile import read_yaml

_NEAREST = 3  # records that are named when none fits
_WIDTH = 110  # columns of the text


def audit(root: Path | str, target: str) -> dict[str, Any]:
    """The report on a stage, or on a directory: a published one, or a copy of it anywhere.

    Raises UserError when no record names the target.
    """
    root = Path(root)
    records = lineage.read(root)
    if not records:
        graph.load_graph(root)  # first of all, this may be no project at all
        raise UserError(
            f"there is no lineage record yet ({lineage.LOG} is missing or empty); `ratchet run` writes them"
        )
    archive = _Archive(records)
    path, record, modified = _find(root, target, archive)
    executions: dict[str, dict[str, Any]] = {}
    waiting = [record]
    while waiting:
        current = waiting.pop(0)
        if current.sha256 not in executions:
            execution, parents = _execution(root, current, archive)
            executions[current.sha256] = execution
            waiting += parents
    differences = _differences(record.files, _tree(path))
    return {
        "target": target,
        "path": _relative(root, path) or str(path),
        "stage": record.stage,
        "record": record.sha256,
        "state": "missing" if not path.exists() else "modified" if modified else "intact",
        "differences": differences if path.exists() else [],
        "log": {
            "path": str(lineage.LOG),
            "records": len(records),
            "head": records[-1].sha256,
            "breaks": lineage.breaks(records),
        },
        "executions": executions,
    }


class _Archive:
    """The records, found by stage and by what they made."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.place = {record.sha256: number for number, record in enumerate(records)}
        self.outputs = {record.sha256: digests.tree_digest(record.files) for record in records}

    def of_stage(self, stage: str) -> list[Record]:
        return [record for record in self.records if record.stage == stage]

    def that_made(self, digest: str, path: str, stage: str | None, before: int) -> Record | None:
        """The newest record above line `before` whose output at `path` had this digest, of `stage` if there is one."""
        fitting = [r for r in self.records[:before] if _digest_inside(r, path) == digest]
        return next((r for r in reversed(fitting) if r.stage == stage), fitting[-1] if fitting else None)


def _digest_inside(record: Record, path: str) -> str | None:
    """What a record says of `path`: its whole output, a directory in it, or a file in it."""
    if path == record.output:
        return digests.tree_digest(record.files)
    if not path.startswith(f"{record.output}/"):
        return None
    inner = path[len(record.output) + 1 :]
    if inner in record.files:
        return record.files[inner]
    below = {n[len(inner) + 1 :]: d for n, d in record.files.items() if n.startswith(f"{inner}/")}
    return digests.tree_digest(below) if below else None


# --- which record ---------------------------------------------------------------------------------------------


def _find(root: Path, target: str, archive: _Archive) -> tuple[Path, Record, bool]:
    """The directory that `target` means, the record of what lies there, and whether it was modified since."""
    stage = _stage_of(root, target, archive)
    if stage is None:
        path = Path(target) if Path(target).is_absolute() else Path.cwd() / target
        if not path.is_dir() and (root / target).is_dir():
            path = root / target
        if root.resolve().is_relative_to(path.resolve()):
            raise UserError(f"{target} is the project itself or holds it; name a stage, or a directory that one made")
        if not path.is_dir():
            known = ", ".join(dict.fromkeys(record.stage for record in archive.records))
            raise UserError(f"{target} is neither a directory nor a stage on record (stages: {known})")
        return _recognise(root, path, archive)
    of_stage = archive.of_stage(stage)
    if not of_stage:
        raise UserError(f"no lineage record names stage {stage}; `ratchet run {stage}` writes one")
    path = root / of_stage[-1].output
    if not path.exists():
        return path, of_stage[-1], False
    return _recognise(root, path, archive)


def _stage_of(root: Path, target: str, archive: _Archive) -> str | None:
    """The stage that `target` names, or None for a directory."""
    if os.sep in target or target in (".", ".."):
        return None
    if archive.of_stage(target):
        return target
    if (root / "dvc.yaml").exists():
        nodes = graph.load_graph(root)
        if target in nodes.nodes or target in nodes.groups:
            names = nodes.resolve(target)
            if len(names) > 1:
                raise UserError(f"{target} stands for {', '.join(names)}; name one of them")
            return names[0]
    return None


def _recognise(root: Path, path: Path, archive: _Archive) -> tuple[Path, Record, bool]:
    found = _tree(path)
    digest = digests.tree_digest(found)
    fitting = [record for record in archive.records if archive.outputs[record.sha256] == digest]
    here = _relative(root, path)
    at_home = [record for record in fitting if record.output == here]
    if at_home:
        return path, _standing(root, at_home, archive), False
    if fitting:
        return path, fitting[-1], False
    likeness = {record.sha256: _likeness(record.files, found) for record in archive.records}
    at_home = [record for record in archive.records if record.output == here]
    ranked = sorted(at_home or archive.records, key=lambda r: (likeness[r.sha256], archive.place[r.sha256]))
    best = ranked[-1]
    if at_home or likeness[best.sha256][0] >= 0.5:
        return path, best, True
    nearest = []
    for record in sorted(archive.records, key=lambda r: (likeness[r.sha256][::-1], archive.place[r.sha256]))[::-1]:
        if record.stage not in [known.stage for known in nearest]:
            nearest.append(record)
    named = "; ".join(
        f"{record.stage} ({len(record.files.keys() & found.keys())} of {len(record.files)} file names, "
        f"{sum(found.get(name) == sha for name, sha in record.files.items())} with equal content)"
        for record in nearest[:_NEAREST]
    )
    raise UserError(f"no lineage record names the bytes in {path}; nearest by file names: {named}")


def _standing(root: Path, records: list[Record], archive: _Archive) -> Record:
    """Of executions that made the same bytes, the one that fits dvc.lock and the inputs on disk best; else the newest.

    A result that came back from the cache is not the newest one.
    """
    if len(records) == 1:
        return records[0]
    lock = read_yaml(root / "dvc.lock") if (root / "dvc.lock").exists() else {}

    def fit(record: Record) -> tuple[int, int]:
        params = ((lock.get("stages") or {}).get(record.stage) or {}).get("params") or {}
        code = {f"code.lock#{name}": lineage.sha256(lineage.canonical(c)) for name, c in params.get(FILE, {}).items()}
        facts = [params.get(PARAMS) == record.definition["externalParameters"]["params"]]
        for entry in record.definition["resolvedDependencies"]:
            name, digest = entry["name"], entry["digest"].get("sha256")
            if name in code:
                facts.append(code[name] == digest)
            elif "stage" in entry.get("annotations", {}) and (root / name).exists():
                facts.append(digests.tree_sha256(root / name) == digest)
        return sum(facts), archive.place[record.sha256]

    return max(records, key=fit)


def _likeness(recorded: Mapping[str, str], found: Mapping[str, str]) -> tuple[float, float]:
    """Shares of files that are equal in content, and in name."""
    names = recorded.keys() | found.keys()
    equal = sum(found.get(name) == digest for name, digest in recorded.items())
    return equal / len(names), len(recorded.keys() & found.keys()) / len(names)


def _relative(root: Path, path: Path) -> str | None:
    inside = path.resolve().is_relative_to(root.resolve())
    return path.resolve().relative_to(root.resolve()).as_posix() if inside else None


def _tree(path: Path) -> dict[str, str]:
    try:
        return digests.tree(path) if path.exists() else {}
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be read ({error.strerror})") from None


def _differences(recorded: Mapping[str, str], found: Mapping[str, str]) -> list[dict[str, str]]:
    problems = {name: "modified" for name in recorded if name in found and found[name] != recorded[name]}
    problems |= {name: "missing" for name in recorded.keys() - found.keys()}
    problems |= {name: "added" for name in found.keys() - recorded.keys()}
    return [{"file": name, "problem": problems[name]} for name in sorted(problems)]


# --- what a record says -----------------------------------------------------------------------------------------


def _execution(root: Path, record: Record, archive: _Archive) -> tuple[dict[str, Any], list[Record]]:
    """An entry of `executions`, and the records of its inputs."""
    inputs, sources, parents = [], [], []
    git: dict[str, Any] = {"commit": None, "dirty": None, "diff_sha256": None, "note": "not on record"}
    code_lock = None
    for entry in record.definition["resolvedDependencies"]:
        name, notes = entry["name"], entry.get("annotations", {})
        if name == "git":
            git = {"commit": entry["digest"].get("gitCommit"), **notes}
        elif name.startswith("code.lock#"):
            code_lock = entry["digest"]["sha256"]
        elif "stage" not in notes:
            sources.append({"name": name, "digest": entry["digest"]})
        else:
            digest = entry["digest"]["sha256"]
            parent = archive.that_made(digest, name, notes["stage"], archive.place[record.sha256])
            if notes["stage"] and parent:
                parents.append(parent)
            inputs.append(_input(root, name, digest, notes, parent if notes["stage"] else None))
    found = _tree(root / record.output)
    outside = record.definition["externalParameters"]
    return {
        "stage": record.stage,
        "output": record.output,
        "sha256": archive.outputs[record.sha256],
        "files": record.files,
        "started": record.metadata["startedOn"],
        "finished": record.metadata["finishedOn"],
        "state": _state_on_disk(record, found, archive),
        "differences": _differences(record.files, found) if found else [],
        "git": git,
        "code_lock": code_lock,
        "params": outside["params"],
        "seed": outside["seed"],
        "environment": record.definition["internalParameters"],
        "rows": record.byproducts["rows"],
        "results": record.byproducts["results"],
        "mlflow": {
            "run_id": record.byproducts["mlflow_run_id"],
            "model_id": record.byproducts["mlflow_model_id"],
            "invocation": record.metadata["invocationId"],
        },
        "resumed_from": record.byproducts["resumed_from"],
        "inputs": inputs,
        "sources": sources,
    }, parents


def _state_on_disk(record: Record, found: Mapping[str, str], archive: _Archive) -> str:
    if not found:
        return "missing"
    digest = digests.tree_digest(dict(found))
    if digest == archive.outputs[record.sha256]:
        return "intact"
    return "replaced" if digest in archive.outputs.values() else "modified"


def _input(root: Path, name: str, digest: str, notes: Mapping[str, Any], parent: Record | None) -> dict[str, Any]:
    exists = (root / name).exists()
    intact = exists and digests.tree_sha256(root / name) == digest
    recorded = notes.get("files") or {}
    return {
        "path": name,
        "sha256": digest,
        "stage": notes["stage"],
        "record": parent.sha256 if parent else None,
        "state": "intact" if intact else "modified" if exists else "missing",
        "differences": [] if intact or not exists or not recorded else _differences(recorded, _tree(root / name)),
        "files": recorded,
    }


# --- for people -------------------------------------------------------------------------------------------------


def render(report: Mapping[str, Any]) -> str:
    """The report as text: what was found first, then the tree of what it was made from, each stage once."""
    record, executions, log = report["record"], report["executions"], report["log"]
    verdict = {
        "intact": "its bytes are those on record",
        "missing": "on record, but no longer on disk",
        "modified": "closest on record, but MODIFIED since:" + _listed(report["differences"]),
    }[report["state"]]
    lines = [f"{report['path']}: the output of stage {report['stage']}; {verdict}", ""]
    lines += _branch(record, executions, set())
    chain = "the chain holds" if not log["breaks"] else "the chain is BROKEN"
    lines += ["", f"{log['path']}: {log['records']} records, {chain}, head {log['head'][:12]}", *log["breaks"]]
    return "\n".join(lines)


def _branch(record: str, executions: Mapping[str, Any], shown: set[str]) -> list[str]:
    execution = executions[record]
    title = f"{execution['stage']}  {execution['output']}  sha256 {execution['sha256'][:12]}"
    if record in shown:
        return [f"{title}  (above)"]
    shown.add(record)
    on_disk = {
        "intact": "",
        "missing": "  no longer on disk",
        "replaced": "  on disk is the output of another execution",
        "modified": "  MODIFIED on disk:" + _listed(execution["differences"]),
    }[execution["state"]]
    inputs, sources = execution["inputs"], execution["sources"]
    below = [_branch(entry["record"], executions, shown) if entry["record"] else [_leaf(entry)] for entry in inputs]
    below += [[f"{source['name']}  {_digest_text(source['digest'])}"] for source in sources]
    gutter = "│  " if below else "   "
    lines = [title + on_disk]
    for fact in _facts(execution):
        lines += textwrap.wrap(fact, _WIDTH, initial_indent=gutter, subsequent_indent=f"{gutter}  ")
    for number, branch in enumerate(below):
        last = number == len(below) - 1
        lines.append(("└─ " if last else "├─ ") + branch[0])
        lines += [("   " if last else "│  ") + line for line in branch[1:]]
    return lines


def _leaf(entry: Mapping[str, Any]) -> str:
    if entry["stage"]:
        return f"{entry['path']}  sha256 {entry['sha256'][:12]}  NO RECORD says how {entry['stage']} made it"
    state = {"intact": "", "missing": ", no longer on disk", "modified": ", MODIFIED since:"}[entry["state"]]
    count = len(entry["files"])
    files = "1 file" if count == 1 else f"{count} files"
    listed = _listed(entry["differences"]) if entry["state"] == "modified" else ""
    return f"{entry['path']}  sha256 {entry['sha256'][:12]}  raw data, {files}{state}{listed}"


def _facts(execution: Mapping[str, Any]) -> Iterator[str]:
    started, finished = (datetime.fromisoformat(execution[name]) for name in ("started", "finished"))
    yield f"{started:%Y-%m-%d %H:%M:%S} UTC, {(finished - started).total_seconds():.0f} s" + (
        f", resumed from run {execution['resumed_from']}" if execution["resumed_from"] else ""
    )
    git = execution["git"]
    code = f"commit {git['commit'][:12]}" if git["commit"] else f"no commit ({git['note']})"
    if git["dirty"]:
        code += f" with uncommitted changes (diff sha256 {git['diff_sha256'][:12]})"
    yield f"{code}, code.lock entry {execution['code_lock'][:12]}"
    environment = execution["environment"]
    torch = environment["packages"].get("torch")
    parts = [
        f"seed {execution['seed']}",
        "1 thread" if environment["threads"] == 1 else f"{environment['threads']} threads",
        f"Python {environment['python']}",
        f"torch {torch}" if torch else "",
        str(environment["accelerator"] or environment["cpu_capability"] or ""),
    ]
    yield ", ".join(part for part in parts if part)
    run = execution["mlflow"]["run_id"]
    yield (
        f"MLflow run {run}"
        if run
        else (
            f"MLflow run: not delivered yet when this was recorded; tag ratchet.invocation = "
            f"{execution['mlflow']['invocation']}"
        )
    )
    if execution["rows"]:
        yield "rows: " + ", ".join(f"{name} {count}" for name, count in execution["rows"].items())
    if execution["results"]:
        yield "results: " + ", ".join(f"{name} {_figure(value)}" for name, value in execution["results"].items())
    params = {name: value for name, value in execution["params"].items() if name not in ("seed", "threads")}
    if params:
        yield "params: " + ", ".join(f"{name}={value}" for name, value in flatten(params).items())


def _figure(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.4g}"


def _listed(differences: list[dict[str, str]]) -> str:
    shown = [f" {entry['file']} ({entry['problem']})" for entry in differences[:5]]
    more = len(differences) - len(shown)
    return ",".join(shown) + (f" and {more} more" if more else "")


def _digest_text(digest: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} {value[:12]}" for kind, value in digest.items()) or "without a digest"
