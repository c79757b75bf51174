"""Outputs that come back from DVC's cache: after a failure, and instead of a run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from flows import dvcfiles
from flows.process import environment
from tasks import digests
from tasks.graph import Node

LINEAGE_LOG = "data/lineage/log.jsonl"


def previous_output(root: Path, node: Node, entry: dict[str, Any]) -> str:
    """Bring back the output that dvc.lock still names after a failed rerun; says what is there now."""
    wanted = dvcfiles.recorded(entry, "outs")
    outs = [out for out in node.outs if out in wanted and _digest(root / out) != wanted[out]]
    if not outs:
        return f"{', '.join(node.outs)} is still the output of the last good run, made with the old inputs."
    absent = [out for out in outs if not dvcfiles.is_cached(root, wanted[out])]
    if absent:
        return f"The last good {', '.join(absent)} is gone: DVC's cache does not hold it."
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "--wait-for-lock", "checkout", "--force", *outs],
        cwd=root,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    names = ", ".join(outs)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        why = " ".join(said)
        return f"The last good {names} could not be brought back ({why}); try `dvc checkout {outs[0]}`."
    return f"Brought back {names} of the last good run; it was made with the old inputs."


def remove_unrecorded(root: Path, node: Node, entry: dict[str, Any]) -> None:
    """Remove outputs of a stage that are not what its dvc.lock entry names."""
    wanted = dvcfiles.recorded(entry, "outs")
    for out in node.outs:
        path = root / out
        if path.exists() and _digest(path) != wanted.get(out):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _digest(path: Path) -> str | None:
    try:
        return digests.dvc_md5(path)
    except FileNotFoundError:
        return None


def unrecorded_restore(root: Path, node: Node) -> str:
    """Check a restored output against its stage's lineage records; says what is wrong, "" when nothing is.

    A stage without any record is not judged.
    """
    path = root / LINEAGE_LOG
    known = list(_recorded_outputs(path, node.name)) if path.is_file() else []
    if not known:
        return ""
    found = {
        f"{out}/{relative}" if relative else out: sha256
        for out in node.outs
        for relative, sha256 in digests.tree(root / out).items()
    }
    if found in known:
        return ""
    for out in node.outs:
        shutil.rmtree(root / out, ignore_errors=True)
    return (
        f"DVC's cache brought back a {', '.join(node.outs)} that no lineage record of {node.name} describes, "
        f"so it was not used. Make it anew with `ratchet run {node.name} --force`."
    )


def _recorded_outputs(path: Path, stage: str) -> Any:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            statement = json.loads(line)["statement"]
            made_by = statement["predicate"]["buildDefinition"]["externalParameters"]["stage"]
        except (ValueError, KeyError, TypeError):
            continue  # `ratchet audit` is who judges the log itself
        if made_by == stage:
            yield {subject["name"]: subject["digest"]["sha256"] for subject in statement.get("subject", [])}
