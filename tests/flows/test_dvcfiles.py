"""Reading and writing dvc.lock beside DVC."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from toy_project import Toy

from flows import dvcfiles


def test_dvc_lock_is_not_read_while_dvc_writes_it(built: Toy) -> None:
    path = built.root / "dvc.lock"
    whole = path.read_text()
    expected = dvcfiles.read_lock(built.root)
    with open(built.root / ".dvc/tmp/lock", "a+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)

        def write_slowly() -> None:
            with open(path, "w") as out:
                for line in whole.splitlines(keepends=True):
                    out.write(line)
                    out.flush()
                    time.sleep(0.002)

        writer = threading.Thread(target=write_slowly)
        writer.start()
        time.sleep(0.05)
        assert path.read_text() != whole
        assert dvcfiles.read_lock(built.root) == expected
        writer.join()


def test_a_busy_dvc_does_not_hold_up_the_plan(built: Toy) -> None:
    time.sleep(0.6)
    with open(built.root / ".dvc/tmp/lock", "a+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        begun = time.monotonic()
        assert set(built.states().values()) == {"fresh"}
        assert time.monotonic() - begun < 2


def test_a_replaced_entry_is_what_dvc_reads(built: Toy) -> None:
    before = dvcfiles.read_lock(built.root)
    entry = dict(before["sft"])
    entry["params"] = {"params.yaml": {"seed": 1, "sft": {"value": 1, "lr": 1e-5, "text": "1e-4", "word": "yes"}}}
    dvcfiles.replace_entry(built.root, "sft", entry)
    assert dvcfiles.read_lock(built.root) == {**before, "sft": entry}
    status = subprocess.run(
        [sys.executable, "-m", "dvc", "status", "--json"], cwd=built.root, capture_output=True, text=True, check=True
    )
    assert list(yaml.safe_load(status.stdout)) == ["sft"]
    dvcfiles.replace_entry(built.root, "sft", None)
    assert "sft" not in dvcfiles.read_lock(built.root)


def test_the_cache_may_lie_elsewhere(tmp_path: Path) -> None:
    (tmp_path / ".dvc").mkdir()
    assert dvcfiles.cache_directory(tmp_path) == tmp_path / ".dvc" / "cache"
    (tmp_path / ".dvc/config").write_text("[core]\n    analytics = false\n[cache]\n    dir = /somewhere/else\n")
    assert dvcfiles.cache_directory(tmp_path) == Path("/somewhere/else")
    (tmp_path / ".dvc/config.local").write_text('[cache]\n    dir = "../shared"\n')
    assert dvcfiles.cache_directory(tmp_path) == tmp_path / ".dvc" / ".." / "shared"


@pytest.mark.parametrize("part", ["listing", "member"])
def test_an_output_is_cached_only_as_a_whole(built: Toy, part: str) -> None:
    md5 = dvcfiles.read_lock(built.root)["sft"]["outs"][0]["md5"]
    assert dvcfiles.is_cached(built.root, md5)
    listing = built.root / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    if part == "listing":
        listing.unlink()
    else:
        member = yaml.safe_load(listing.read_text())[0]["md5"]
        (built.root / ".dvc/cache/files/md5" / member[:2] / member[2:]).unlink()
    assert not dvcfiles.is_cached(built.root, md5)
