"""Installed versions of imported packages and of everything they require."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.yamlfile import write_atomically

_CACHE_FILE = ".ratchet/cache/packages.json"


def versions(root: Path, imported: Iterable[str]) -> dict[str, str]:
    """Distribution -> version, for the distributions behind top-level import names and their requirements.

    Names that are not installed are left out: they are optional imports. The local part of a version
    ("+cpu") is left out too, because the same release is published under several.
    """
    cache = _read_cache(root)
    known = cache["closures"]
    missing = [name for name in imported if name not in known]
    if missing:
        providers = _providers(missing)
        for name in missing:
            known[name] = _closure(providers.get(name, ()))
        with suppress(PermissionError):  # without a cache they are looked up anew each time
            write_atomically(root / _CACHE_FILE, json.dumps(cache, separators=(",", ":")))
    found: dict[str, str] = {}
    for name in imported:
        found.update(known[name])
    return dict(sorted(found.items()))


def _read_cache(root: Path) -> dict[str, Any]:
    key = [platform.python_version(), *_environment()]
    with suppress(FileNotFoundError, ValueError):  # a missing or damaged cache is filled anew
        cache = json.loads((root / _CACHE_FILE).read_text(encoding="utf-8"))
        if cache["key"] == key:
            return cache
    return {"key": key, "closures": {}}


def _environment() -> list[Any]:
    """Changes whenever a distribution is installed, removed or upgraded."""
    stamps = []
    for entry in sys.path:
        directory = Path(entry)
        if directory.name in ("site-packages", "dist-packages") and directory.is_dir():
            stamps.append([str(directory), directory.stat().st_mtime_ns])
    return stamps


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _providers(names: list[str]) -> dict[str, list[str]]:
    from importlib.metadata import packages_distributions

    distributions = packages_distributions()
    return {name: sorted({_canonical(d) for d in distributions.get(name, ())}) for name in names}


def _closure(distributions: Iterable[str]) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, distribution

    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    waiting = [(name, "") for name in distributions]
    seen = set()
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        found[name] = installed.version.split("+")[0]
        for line in installed.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting.append((_canonical(requirement.name), ""))
                waiting.extend((_canonical(requirement.name), wanted) for wanted in requirement.extras)
    return found
