"""What a finished output must hold, its manifest, and how it reaches its place in one step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from pipelines.files import sync
from tasks import digests
from tasks.yamlfile import write_atomically

MANIFEST = "manifest.json"
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle"}
_TEXTS = {".json", ".jsonl", ".yaml", ".yml", ".html", ".txt", ".csv", ".md", ".jinja"}
_SMALL = 4 << 20  # bytes; larger text files are data, not settings


class ContractError(Exception):
    """A stage's code broke the contract of stages: a fault of the program, not of its user."""


def check_output(output: Path, root: Path) -> None:
    """Refuse an empty output, links, pickles, and texts that name a place on this machine (ContractError)."""
    files = [path for path in sorted(output.rglob("*")) if not path.is_dir() or path.is_symlink()]
    if not files:
        raise ContractError("the stage ended without writing any output")
    for path in files:
        name = path.relative_to(output)
        if path.is_symlink() or not path.is_file():
            raise ContractError(f"output file {name} is a link or special file; outputs are plain files")
        if path.suffix in _PICKLES or (path.suffix == ".npy" and _holds_objects(path)):
            raise ContractError(f"output file {name} is a pickle, which runs code when loaded; use safetensors or JSON")
        if path.suffix in _TEXTS and path.stat().st_size <= _SMALL:
            text = path.read_bytes()
            for place in _places(root):
                if place.encode() in text:
                    raise ContractError(f"output file {name} names a place on this machine ({place})")


def _places(root: Path) -> list[str]:
    home = os.path.expanduser("~").rstrip("/")
    return [str(root)] * (len(root.parts) > 1) + [f"{home}/"] * (home.count("/") >= 1)


def _holds_objects(path: Path) -> bool:
    with open(path, "rb") as file:
        header = file.read(256).split(b"\n", 1)[0]
    return b"'descr': '|O'" in header or b"'O'" in header


def is_checkpoint(files: Mapping[str, str]) -> bool:
    """Whether these files are a model: config.json and weights beside it."""
    return "config.json" in files and any("/" not in name and name.endswith(".safetensors") for name in files)


def write_manifest(scratch: Path, files: Mapping[str, str]) -> None:
    """Write the digests of the files in `scratch/output`: from here on the work counts as finished."""
    write_atomically(scratch / MANIFEST, json.dumps(files, indent=1, sort_keys=True) + "\n")


def finished_files(scratch: Path) -> dict[str, str] | None:
    """The manifest when the finished output lies unharmed in `scratch`, else None."""
    try:
        files = json.loads((scratch / MANIFEST).read_text())
    except (FileNotFoundError, ValueError):
        return None
    output = scratch / "output"
    return files if files and output.is_dir() and digests.tree(output) == files else None


def publish(output: Path, out: Path, sibling: Path) -> None:
    """Copy `output` to `sibling` and rename that to `out`; what stood at `out` is replaced."""
    shutil.rmtree(sibling, ignore_errors=True)
    sibling.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(output, sibling, copy_function=shutil.copyfile)
        for path in sibling.rglob("*"):
            if path.is_file():
                sync(path)
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists():
            shutil.rmtree(out)
        os.rename(sibling, out)
        sync(out.parent)
    finally:
        shutil.rmtree(sibling, ignore_errors=True)
