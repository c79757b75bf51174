"""What DVC keeps on disk, read without DVC: dvc.lock, the cache of outputs, the run cache.

DVC itself is called for two things only, in processes of their own: to run a stage and to check out outputs.
"""

from __future__ import annotations

import configparser
import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipelines.errors import UserError
from tasks.yamlfile import read_yaml, write_atomically

LOCK_FILE = "dvc.lock"
_LOCK_PATIENCE = 30.0  # seconds; DVC holds its lock for moments only


def read_lock(root: Path) -> dict[str, Any]:
    """Stage -> {"cmd", "deps", "params", "outs"} as dvc.lock has it; empty before the first run."""
    path = root / LOCK_FILE
    if not path.is_file():
        return {}
    advice = "Take it back from git (`git checkout dvc.lock`) or delete it: outputs come back from the cache."
    try:
        document = read_yaml(path)
    except UserError as error:
        raise UserError(f"{error} {advice}") from None
    stages = document.get("stages") or {}
    if not isinstance(stages, dict) or not all(isinstance(entry, dict) for entry in stages.values()):
        raise UserError(f"dvc.lock: its `stages` are not a mapping of stages. {advice}")
    if str(document.get("schema", "2.0")) != "2.0":
        raise UserError(f"dvc.lock: schema {document['schema']} is unknown, 2.0 is expected. {advice}")
    return stages


def recorded(entry: dict[str, Any], kind: str) -> dict[str, str]:
    """Path -> MD5 of the `deps` or `outs` of a dvc.lock entry."""
    return {item["path"]: item.get("md5", "") for item in entry.get(kind) or []}


def cache_directory(root: Path) -> Path:
    """Where DVC keeps the outputs; `cache.dir` of its configuration moves it."""
    directory = root / ".dvc" / "cache"
    for name in ("config", "config.local"):
        path = root / ".dvc" / name
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        with suppress(FileNotFoundError, configparser.Error):  # DVC itself reports a broken configuration
            parser.read_string(path.read_text(encoding="utf-8"))
            if parser.has_option("cache", "dir"):
                directory = path.parent / parser.get("cache", "dir").strip("\"'")
    return directory


def _object(cache: Path, md5: str) -> Path:
    return cache / "files" / "md5" / md5[:2] / md5[2:]


@lru_cache(maxsize=256)
def _members(listing: Path, stamp: int) -> tuple[str, ...]:
    return tuple(row["md5"] for row in json.loads(listing.read_text(encoding="utf-8")))


def is_cached(root: Path, md5: str) -> bool:
    """Whether the cache holds every file of an output."""
    cache = cache_directory(root)
    top = _object(cache, md5)
    if not top.is_file():
        return False
    if not md5.endswith(".dir"):
        return True
    try:
        members = _members(top, top.stat().st_mtime_ns)
    except (ValueError, KeyError, TypeError):
        return False
    return all(_object(cache, member).is_file() for member in members)


@contextmanager
def _dvc_locked(root: Path) -> Iterator[None]:
    path = root / ".dvc" / "tmp" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + _LOCK_PATIENCE
    with open(path, "a+") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"DVC is busy in {root}: a dvc command holds .dvc/tmp/lock. Let it end and try again."
                    ) from None
                time.sleep(0.05)
        try:
            yield
        finally:
            fcntl.flock(stream, fcntl.LOCK_UN)


def replace_entry(root: Path, stage: str, entry: dict[str, Any] | None) -> None:
    """Put back what dvc.lock said of a stage, or take its entry out, while no DVC process writes it."""
    import io

    from ruamel.yaml import YAML

    with _dvc_locked(root):
        stages = dict(read_lock(root))
        if entry is None:
            stages.pop(stage, None)
        else:
            stages[stage] = entry
        text = io.StringIO()
        YAML().dump({"schema": "2.0", "stages": stages}, text)
        write_atomically(root / LOCK_FILE, text.getvalue())


def forget_run(root: Path, entry: dict[str, Any], since: float) -> None:
    """Delete what the run cache learned of an entry after the moment `since`: it must never be restored."""
    for path in (cache_directory(root) / "runs").glob("*/*/*"):
        if path.is_file() and path.stat().st_mtime >= since - 1:
            found = read_yaml(path)
            if all(found.get(key) == entry.get(key) for key in ("cmd", "params", "deps", "outs")):
                path.unlink()
                if not any(path.parent.iterdir()):  # DVC fails on an empty directory of a key
                    path.parent.rmdir()
