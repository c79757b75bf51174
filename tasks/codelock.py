"""code.lock: per stage group, what code and which packages its result depends on.

    {GROUP: {"python": "3.11.7", "modules": {file: digest}, "data": {file: digest},
             "packages": {name: version}}}

The modules of a group are the import closure of `tasks/GROUP.py` over the project's own packages. A digest is
the SHA-256 of a module's syntax tree without docstrings, comments and positions, so rewording never retrains.
The packages are the installed versions of everything the imported distributions require.

Left out: BOOKKEEPING, the modules that run, record and audit a stage but compute nothing of its result, and
whatever is reached through them alone (MLflow, for one). A change of bookkeeping does not retrain.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipelines.errors import UserError
from tasks import packages
from tasks.graph import Graph, load_graph
from tasks.imports import Module, scan
from tasks.yamlfile import parse_yaml, write_atomically

FILE = "code.lock"
PROJECT_PACKAGES = ("flows", "tasks", "pipelines")
BOOKKEEPING = tuple(
    f"tasks/{name}.py"
    for name in (
        "audit",
        "codelock",
        "contract",
        "courier",
        "digests",
        "execution",
        "graph",
        "imports",
        "lineage",
        "outcome",
        "packages",
        "publishing",
        "recording",
        "settings",
        "torchrun",
        "yamlfile",
    )
)
_CACHE_FILE = ".ratchet/cache/code.json"


def build(root: Path | str, graph: Graph) -> dict[str, Any]:
    """What code.lock should say now, for every group whose command is `python -m tasks.GROUP`."""
    sources = _Sources(Path(root))
    lock = {group: _entry(sources, group) for group, nodes in graph.groups.items() if nodes[0].module}
    sources.save()
    return lock


def current(root: Path | str, group: str) -> dict[str, Any]:
    """What code.lock should say now of one group."""
    sources = _Sources(Path(root))
    entry = _entry(sources, group)
    sources.save()
    return entry


def read(root: Path | str) -> dict[str, Any]:
    """What code.lock says; empty when there is none."""
    path = Path(root) / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError as error:
        raise UserError(f"{FILE}: not UTF-8 text (byte {error.start}); `ratchet plan` writes it anew.") from None
    try:
        return json.loads(text)
    except ValueError:
        return parse_yaml(text, FILE)


def refresh(root: Path | str, graph: Graph | None = None) -> dict[str, Any]:
    """Bring code.lock up to date, writing it only when it changes, and return its content."""
    root = Path(root)
    lock = build(root, graph or load_graph(root))
    with suppress(UserError):  # an unreadable code.lock is generated anew
        if read(root) == lock:
            return lock
    if lock:
        write_atomically(root / FILE, json.dumps(lock, indent=1, sort_keys=True) + "\n")
    return lock


def explain(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two entries, in words; empty when nothing does."""
    reasons = []
    for kind in ("modules", "data"):
        before, after = old.get(kind) or {}, new.get(kind) or {}
        for file in sorted({*before, *after}):
            if file not in before:
                reasons.append(f"code {file} is new to this stage")
            elif file not in after:
                reasons.append(f"code {file} is no longer part of this stage")
            elif before[file] != after[file]:
                reasons.append(f"code {file} changed")
    if old.get("python") != new.get("python"):
        reasons.append(f"Python {old.get('python')} -> {new.get('python')}")
    before, after = old.get("packages") or {}, new.get("packages") or {}
    for name in sorted({*before, *after}):
        if name not in before:
            reasons.append(f"package {name} {after[name]} is new to this stage")
        elif name not in after:
            reasons.append(f"package {name} {before[name]} is no longer part of this stage")
        elif before[name] != after[name]:
            reasons.append(f"package {name} {before[name]} -> {after[name]}")
    return reasons


def closure(root: Path | str, group: str) -> set[str]:
    """The module files a group may load: its closure and the bookkeeping."""
    return {*current(root, group)["modules"], *BOOKKEEPING}


def code_root(root: Path) -> Path:
    """Where the project's packages lie: in the project, or in the installed copy when it brings none."""
    return root if (root / "tasks").is_dir() else Path(__file__).resolve().parent.parent


class _Sources:
    """Parsed modules of the project, remembered by inode, size and times."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = code_root(root)
        self.cache_file = root / _CACHE_FILE
        self.cache: dict[str, Any] = {}
        self.changed = False
        with suppress(FileNotFoundError, ValueError):  # without a usable cache everything is parsed once more
            self.cache = json.loads(self.cache_file.read_text(encoding="utf-8"))
        if self.cache.get("format") != [str(self.base), platform.python_version(), *scan.format]:
            self.cache = {"format": [str(self.base), platform.python_version(), *scan.format], "modules": {}}
        self.modules: dict[str, Module] = {}

    def module(self, file: str) -> Module:
        if file not in self.modules:
            path = self.base / file
            status = path.stat()
            stamp = [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
            entry = self.cache["modules"].get(file)
            if entry is None or entry[0] != stamp:
                entry = [stamp, scan(path, file, self.base, PROJECT_PACKAGES).as_json()]
                self.cache["modules"][file] = entry
                self.changed = True
            self.modules[file] = Module(**entry[1])
        return self.modules[file]

    def files_of(self, dotted: str) -> list[str]:
        """The module `dotted` and the `__init__` of every package on the way; empty when there is none."""
        parts = dotted.split(".")
        found = []
        for count in range(1, len(parts) + 1):
            stem = "/".join(parts[:count])
            if (self.base / stem / "__init__.py").is_file():
                found.append(f"{stem}/__init__.py")
            elif (self.base / f"{stem}.py").is_file():
                found.append(f"{stem}.py")
                break
            elif not (self.base / stem).is_dir():
                break
        return found

    def save(self) -> None:
        if self.changed:
            with suppress(PermissionError):  # a read-only project is parsed anew each time
                write_atomically(self.cache_file, json.dumps(self.cache, separators=(",", ":")))


def _entry(sources: _Sources, group: str) -> dict[str, Any]:
    start = f"tasks/{group}.py"
    if not (sources.base / start).is_file():
        raise UserError(f"dvc.yaml: the stage `{group}` runs tasks.{group}, and there is no {start}.")
    modules: dict[str, str] = {}
    data: set[str] = set()
    distributions: set[str] = set()
    waiting = sources.files_of(f"tasks.{group}")
    while waiting:
        file = waiting.pop()
        if file in modules or file in BOOKKEEPING:
            continue
        module = sources.module(file)
        if module.problem:
            raise UserError(module.problem)
        modules[file] = module.digest
        data.update(module.data)
        distributions.update(module.external)
        for dotted in module.imports:
            waiting.extend(sources.files_of(dotted))
    return {
        "python": platform.python_version(),
        "modules": dict(sorted(modules.items())),
        "data": {file: _data_digest(sources.base, file) for file in sorted(data)},
        "packages": packages.versions(sources.root, distributions),
    }


def _data_digest(base: Path, file: str) -> str:
    from tasks.digests import file_digests

    path = base / file
    if not path.is_file():
        raise UserError(f"the code names the data file {file}, and there is none; add it or mend the name.")
    return file_digests(path)["sha256"]


def loaded_outside(root: Path | str, group: str, files: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Of loaded module files, those of the project that are outside the closure of `group`."""
    base = code_root(Path(root)).resolve()
    allowed = closure(root, group)
    outside = []
    for file in files:
        path = Path(file).resolve()
        if path.is_relative_to(base):
            relative = path.relative_to(base).as_posix()
            if relative.split("/")[0] in PROJECT_PACKAGES and relative not in allowed:
                outside.append(relative)
    return sorted(outside)
