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
from tasks.yamlfile import parse_yaml, read_yaml, write_atomically

LOCK_FILE = "dvc.lock"
_LOCK_PATIENCE = 600.0  # seconds; DVC holds its lock while it copies an output into its cache
_QUIET = 0.5  # seconds without a change after which dvc.lock is taken as written to its end
_READ_PATIENCE = 20.0  # seconds


def read_lock(root: Path) -> dict[str, Any]:
    """Stage -> {"cmd", "deps", "params", "outs"} as dvc.lock has it; empty before the first run."""
    advice = "Take it back from git (`git checkout dvc.lock`) or delete it: outputs come back from the cache."
    try:
        text = _steady_text(root)
        if text is None:
            return {}
        document = parse_yaml(text, LOCK_FILE)
    except UnicodeDecodeError as error:
        raise UserError(f"dvc.lock: not UTF-8 text (byte {error.start}). {advice}") from None
    except UserError as error:
        raise UserError(f"{error} {advice}") from None
    if str(document.get("schema")) != "2.0":
        found = f"has schema {document['schema']}" if "schema" in document else "names no schema"
        raise UserError(f"dvc.lock: it {found}, 2.0 is expected. {advice}")
    stages = document.get("stages") or {}
    if not isinstance(stages, dict) or not all(map(_is_entry, stages.values())):
        raise UserError(f"dvc.lock: its `stages` are not a mapping of stages. {advice}")
    return stages


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    items = [item for kind in ("deps", "outs") for item in entry.get(kind) or []]
    return all(isinstance(item, dict) and "path" in item for item in items)


def _steady_text(root: Path) -> str | None:
    """The text of dvc.lock at a moment when nobody is writing it; None when there is none.

    DVC writes the file in place, under its lock. When that lock is free, reading under it is safe; else DVC may be
    busy for minutes with something else, and a file that has not changed for a while is taken as written.
    """
    path = root / LOCK_FILE
    if not (root / ".dvc").is_dir():
        return path.read_text(encoding="utf-8") if path.exists() else None
    deadline = time.monotonic() + _READ_PATIENCE
    while True:
        try:
            with _dvc_lock(root, fcntl.LOCK_SH):
                return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except PermissionError:  # a project we may not write to: nobody writes this file either
            return path.read_text(encoding="utf-8") if path.exists() else None
        except BlockingIOError:
            before = path.stat() if path.exists() else None
            text = path.read_text(encoding="utf-8") if before else None
            after = path.stat() if path.exists() else None
            unchanged = before is None or (after is not None and before.st_mtime_ns == after.st_mtime_ns)
            quiet = before is None or time.time() - before.st_mtime > _QUIET
            if (unchanged and quiet) or time.monotonic() > deadline:
                return text
            time.sleep(0.02)


def recorded(entry: dict[str, Any], kind: str) -> dict[str, str]:
    """Path -> MD5 of the `deps` or `outs` of a dvc.lock entry."""
    return {item["path"]: item.get("md5", "") for item in entry.get(kind) or []}


def cache_directory(root: Path) -> Path:
    """Where DVC keeps the outputs; `cache.dir` of its configuration moves it."""
    return root / ".dvc" / _option(root, "cache", "dir", "cache")


def wants_git(root: Path) -> bool:
    """Whether DVC looks for a git repository around the project; `core.no_scm` of its configuration says no."""
    return _option(root, "core", "no_scm", "false").lower() != "true"


def _option(root: Path, section: str, name: str, default: str) -> str:
    value = default
    for file in ("config", "config.local"):
        parser = configparser.ConfigParser(interpolation=None, strict=False)
        with suppress(FileNotFoundError, configparser.Error):  # DVC itself reports a broken configuration
            parser.read_string((root / ".dvc" / file).read_text(encoding="utf-8"))
            value = parser.get(section, name, fallback=value).strip("\"'")
    return value


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
def _dvc_lock(root: Path, mode: int) -> Iterator[None]:
    """Hold DVC's own lock of the project. Raises BlockingIOError when a DVC process holds it."""
    path = root / ".dvc" / "tmp" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as stream:
        fcntl.flock(stream, mode | fcntl.LOCK_NB)
        yield  # closing the file gives the lock back


@contextmanager
def _dvc_waits(root: Path) -> Iterator[None]:
    deadline = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            with _dvc_lock(root, fcntl.LOCK_EX):
                yield
                return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(f"DVC is busy in {root}. Let the other dvc command end and try again.") from None
            time.sleep(0.05)


def release_ended(root: Path) -> None:
    """Take out of DVC's own table of who reads and writes what the processes that are no `dvc` any more.

    DVC believes an entry as long as any process has its number, be it one that ended and was not waited for or a
    later one; a table that was cut by a kill it cannot read at all.
    """
    path = root / ".dvc" / "tmp" / "rwlock"
    if not path.exists():
        return
    with open(path.with_name("rwlock.lock"), "a+") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # DVC holds it for an instant at a time
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
            kept = {
                "read": {
                    name: living
                    for name, infos in table.get("read", {}).items()
                    if (living := [info for info in infos if _is_dvc(info["pid"])])
                },
                "write": {name: info for name, info in table.get("write", {}).items() if _is_dvc(info["pid"])},
            }
        except (ValueError, TypeError, KeyError, AttributeError):
            path.unlink()
            return
        if kept != table:
            write_atomically(path, json.dumps(kept))


def _is_dvc(pid: int) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and any("dvc" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def replace_entry(root: Path, stage: str, entry: dict[str, Any] | None) -> None:
    """Put back what dvc.lock said of a stage, or take its entry out, while no DVC process writes it."""
    import io

    from ruamel.yaml import YAML

    with _dvc_waits(root):
        stages = dict((parse_yaml((root / LOCK_FILE).read_text(encoding="utf-8"), LOCK_FILE)).get("stages") or {})
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
