"""SHA-256 and MD5 of files and directories, remembered by inode, size and times.

MD5 is what DVC keys its cache with; SHA-256 is what lineage records hold. A file is read once for both.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tasks.yamlfile import write_atomically

IGNORED = (".*.publishing", "__pycache__")
"""Names that are no part of any output. The same patterns stand in .dvcignore."""

_CACHE_FILE = ".ratchet/cache/digests.json"
_RACY_NS = 100_000_000  # a file changed so recently could change again without its times moving
_CHUNK = 1 << 20


class _Cache:
    """relative path -> [inode, size, mtime, ctime, sha256, md5], in one JSON file of the project."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.file = root / _CACHE_FILE
        self.entries: dict[str, list[Any]] = {}
        self.stamp: tuple[int, int] | None = None

    def refresh(self) -> None:
        try:
            status = self.file.stat()
        except FileNotFoundError:
            return
        stamp = (status.st_ino, status.st_mtime_ns)
        if stamp != self.stamp:
            with suppress(ValueError, FileNotFoundError):  # a damaged or deleted cache costs one more reading
                self.entries.update(json.loads(self.file.read_text(encoding="utf-8")))
            self.stamp = stamp

    def save(self, below: str, seen: Collection[str]) -> None:
        self.refresh()
        prefix = below + "/"
        gone = [k for k in self.entries if (k == below or k.startswith(prefix)) and k not in seen]
        for key in gone:
            del self.entries[key]
        # a read-only project is digested anew each time; the file may be deleted while we look
        with suppress(PermissionError, FileNotFoundError):
            write_atomically(self.file, json.dumps(self.entries, separators=(",", ":")))
            status = self.file.stat()
            self.stamp = (status.st_ino, status.st_mtime_ns)


_caches: dict[Path, _Cache] = {}
_lock = threading.RLock()


def _cache_for(path: Path) -> _Cache | None:
    for directory in (path, *path.parents):
        if directory in _caches:
            return _caches[directory]
        if (directory / "dvc.yaml").is_file():
            return _caches.setdefault(directory, _Cache(directory))
    return None


def _digest(path: Path) -> tuple[str, str]:
    sha256, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            sha256.update(chunk)
            md5.update(chunk)
    return sha256.hexdigest(), md5.hexdigest()


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """(relative path, path) of every file below a directory, or ("", path) for a file."""
    if path.is_file():
        yield "", path
        return
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist")
    for directory, subdirectories, names in os.walk(path, followlinks=True):
        subdirectories[:] = sorted(n for n in subdirectories if not _ignored(n))
        for name in sorted(names):
            if not _ignored(name):
                file = Path(directory, name)
                yield file.relative_to(path).as_posix(), file


def _ignored(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in IGNORED)


def _pairs(path: Path | str) -> dict[str, tuple[str, str]]:
    """relative path -> (sha256, md5) of every file of `path`."""
    path = Path(os.path.abspath(path))
    cache = _cache_for(path)
    if cache is None:
        return {relative: _digest(file) for relative, file in _files(path)}
    with _lock:
        return _cached_pairs(path, cache)


def _cached_pairs(path: Path, cache: _Cache) -> dict[str, tuple[str, str]]:
    cache.refresh()
    found: dict[str, tuple[str, str]] = {}
    seen: set[str] = set()
    changed = False
    for relative, file in _files(path):
        key = file.relative_to(cache.root).as_posix()
        seen.add(key)
        status = file.stat()
        stamp = [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        entry = cache.entries.get(key)
        if entry is None or entry[:4] != stamp:
            now = time.time_ns()
            entry = [*stamp, *_digest(file)]
            if now - max(status.st_mtime_ns, status.st_ctime_ns) > _RACY_NS:
                cache.entries[key] = entry
                changed = True
        found[relative] = (entry[4], entry[5])
    if changed:
        cache.save(path.relative_to(cache.root).as_posix(), seen)
    return found


def file_digests(path: Path | str) -> dict[str, str]:
    """{"sha256", "md5"} of one file."""
    sha256, md5 = _pairs(path)[""]
    return {"sha256": sha256, "md5": md5}


def tree(path: Path | str) -> dict[str, str]:
    """Relative path -> SHA-256 of every file below a directory; {"": SHA-256} for a file."""
    return {relative: sha256 for relative, (sha256, _) in _pairs(path).items()}


def tree_sha256(path: Path | str) -> str:
    """One SHA-256 for a directory: that of the canonical JSON of its tree. For a file: its own."""
    files = tree(path)
    return files[""] if "" in files else tree_digest(files)


def tree_digest(files: dict[str, str]) -> str:
    """What `tree_sha256` says of a directory with these files (relative path -> SHA-256)."""
    text = json.dumps(files, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def dvc_md5(path: Path | str, without: Collection[str] = ()) -> str:
    """What dvc.lock says of a file, or of a directory (ends in ".dir").

    `without` names children of the directory, by relative path, to leave out.
    """
    pairs = _pairs(path)
    if "" in pairs:
        return pairs[""][1]
    rows = [
        {"md5": md5, "relpath": relative}
        for relative, (_, md5) in pairs.items()
        if not any(relative == name or relative.startswith(name + "/") for name in without)
    ]
    rows.sort(key=lambda row: row["relpath"])
    return hashlib.md5(json.dumps(rows).encode("utf-8"), usedforsecurity=False).hexdigest() + ".dir"
