from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks import digests

REPOSITORY = Path(__file__).resolve().parents[2]


def age(path: Path, seconds: float = 10) -> None:
    """Make a file old enough to be remembered: a fresh one could change again within one tick of its clock."""
    moment = time.time() - seconds
    os.utime(path, (moment, moment))
    time.sleep(0.15)  # the change time cannot be set


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "dvc.yaml").write_text("stages: {}\n")
    directory = tmp_path / "data" / "sft"
    (directory / "deep").mkdir(parents=True)
    (directory / "a.txt").write_text("alpha")
    (directory / "deep" / "b.txt").write_text("beta")
    return tmp_path


def test_digests_are_those_of_the_standard_tools(project: Path) -> None:
    path = project / "data/sft/a.txt"
    assert digests.file_digests(path) == {
        "sha256": hashlib.sha256(b"alpha").hexdigest(),
        "md5": hashlib.md5(b"alpha").hexdigest(),
    }
    tree = digests.tree(project / "data/sft")
    assert tree == {
        "a.txt": hashlib.sha256(b"alpha").hexdigest(),
        "deep/b.txt": hashlib.sha256(b"beta").hexdigest(),
    }
    canonical = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    assert digests.tree_sha256(project / "data/sft") == hashlib.sha256(canonical.encode()).hexdigest()
    assert digests.tree_sha256(path) == hashlib.sha256(b"alpha").hexdigest()
    assert digests.tree_sha256(project / "data/sft") == digests.tree_digest(tree)


def test_directory_digests_are_those_of_dvc(project: Path) -> None:
    (project / "data/sft/empty").mkdir()
    (project / "data/sft/ünïcode ✓.txt").write_text("ü")
    (project / "data/sft/__pycache__").mkdir()
    (project / "data/sft/__pycache__/x.pyc").write_text("ignored")
    (project / "data/sft/.1.publishing").mkdir()
    (project / "data/sft/.1.publishing/x").write_text("ignored")
    shutil.copy(REPOSITORY / ".dvcignore", project / ".dvcignore")
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=project, check=True)
    from dvc.repo import Repo
    from dvc_data.hashfile.build import build

    with Repo(str(project)) as repo:
        odb = repo.cache.local
        _, _, tree = build(odb, str(project / "data/sft"), odb.fs, "md5", ignore=repo.dvcignore, dry_run=True)
    assert digests.dvc_md5(project / "data/sft") == tree.hash_info.value


def test_ignored_names_stand_in_dvcignore() -> None:
    assert set(digests.IGNORED) <= set((REPOSITORY / ".dvcignore").read_text().split())


def test_a_known_file_is_not_read_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project / "data/sft/a.txt"
    for each in (path, project / "data/sft/deep/b.txt"):
        age(each)
    before = digests.tree(project / "data/sft")
    monkeypatch.setattr(digests, "_caches", {})  # as a new process would have it
    read: list[Path] = []
    honest = digests._digest
    monkeypatch.setattr(digests, "_digest", lambda p: read.append(p) or honest(p))
    assert digests.tree(project / "data/sft") == before
    assert read == []
    path.write_text("gamma")
    assert digests.tree(project / "data/sft")["a.txt"] == hashlib.sha256(b"gamma").hexdigest()
    assert read == [path]


def test_an_edit_that_hides_behind_the_old_time_is_seen(project: Path) -> None:
    path = project / "data/sft/a.txt"
    age(path)
    old = path.stat()
    digests.tree(project / "data/sft")
    path.write_text("ALPHA")
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert digests.tree(project / "data/sft")["a.txt"] == hashlib.sha256(b"ALPHA").hexdigest()


def test_quick_edits_of_the_same_size_are_seen(project: Path) -> None:
    path = project / "data/sft/a.txt"
    for text in ("11111", "22222", "33333", "44444"):
        path.write_text(text)
        assert digests.file_digests(path)["sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_a_damaged_cache_is_no_harm_and_gone_files_are_dropped(project: Path) -> None:
    cache = project / ".ratchet/cache/digests.json"
    for name in ("a.txt", "deep/b.txt"):
        age(project / "data/sft" / name)
    before = digests.tree(project / "data/sft")
    assert "data/sft/deep/b.txt" in json.loads(cache.read_text())
    cache.write_text("{ damaged")
    assert digests.tree(project / "data/sft") == before
    shutil.rmtree(project / "data/sft/deep")
    (project / "data/sft/a.txt").write_text("changed")
    age(project / "data/sft/a.txt")
    digests.tree(project / "data/sft")
    assert list(json.loads(cache.read_text())) == ["data/sft/a.txt"]


def test_a_directory_outside_any_project_is_digested_without_a_cache(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "x").write_text("x")
    assert digests.tree(tmp_path / "copy") == {"x": hashlib.sha256(b"x").hexdigest()}
    assert not (tmp_path / ".ratchet").exists()
    with pytest.raises(FileNotFoundError):
        digests.tree(tmp_path / "nothing")


def test_parts_can_be_left_out_of_a_directory_digest(project: Path) -> None:
    whole = digests.dvc_md5(project / "data/sft")
    assert digests.dvc_md5(project / "data/sft", without=["deep"]) != whole
    shutil.rmtree(project / "data/sft/deep")
    assert digests.dvc_md5(project / "data/sft", without=["deep"]) == digests.dvc_md5(project / "data/sft")


def test_two_processes_may_write_the_cache_at_once(project: Path) -> None:
    for number in range(20):
        (project / "data/sft" / f"{number}.txt").write_text(str(number))
        moment = time.time() - 10
        os.utime(project / "data/sft" / f"{number}.txt", (moment, moment))
    time.sleep(0.15)
    script = (
        "import sys; from pathlib import Path; from tasks import digests\n"
        "for _ in range(20):\n"
        "    digests._caches.clear(); Path(sys.argv[1], '.ratchet/cache/digests.json').unlink(missing_ok=True)\n"
        "    print(digests.tree_sha256(Path(sys.argv[1], 'data/sft')))"
    )
    command = [sys.executable, "-c", script, str(project)]
    both = [subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {line for process in both for line in process.communicate(timeout=60)[0].split()}
    assert said == {digests.tree_sha256(project / "data/sft")}
    assert all(process.returncode == 0 for process in both)
