"""What a person meets at the command line: messages, exit codes, shapes of output, and what is not imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from toy_project import REPOSITORY, STAGES, Toy

HEAVY = ("torch", "transformers", "prefect", "mlflow", "dvc", "pyarrow", "datasets", "numpy")


def test_the_plan_as_json_has_its_documented_shape(built: Toy) -> None:
    built.set("rl.clip.high", 0.3)
    built.set("sft.lr", 1e-4)
    document = json.loads(built.ratchet("plan", "--json").stdout)
    assert list(document) == ["stages"]
    assert all(list(stage) == ["name", "state", "reasons"] for stage in document["stages"])
    plan = {stage["name"]: (stage["state"], stage["reasons"]) for stage in document["stages"]}
    assert list(plan) == STAGES
    assert plan["base"] == ("fresh", [])
    assert plan["sft"] == ("stale", ["parameter sft.lr 0.001 -> 0.0001"])
    assert plan["filter"] == ("may-become-stale", ["behind sft"])
    assert plan["rl@1"] == ("stale", ["parameter rl.clip.high 0.28 -> 0.3"])
    assert plan["evaluate"] == ("may-become-stale", ["behind sft", "behind rl@1", "behind rl@2"])


@pytest.mark.parametrize("command", ["plan", "run", "logs"])
def test_light_commands_import_nothing_heavy(built: Toy, command: str) -> None:
    arguments = ["ratchet", command, *(["base"] if command == "logs" else [])]
    script = (
        f"import sys; sys.argv = {arguments!r}\n"
        "from flows.cli import main\n"
        "try:\n    main()\n"
        f"finally:\n    print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=built.root, env=built.environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_mistakes_exit_2_with_one_message_and_no_traceback(built: Toy) -> None:
    for arguments, said in [
        (["run", "evalute"], "Did you mean `evaluate`?"),
        (["logs", "nope"], "There is no stage `nope`"),
        (["logs", "rl"], "name one of rl@1, rl@2"),
        (["-C", "/nowhere", "plan"], "-C /nowhere"),
        (["-C", "/", "plan"], "is not a Ratchet project"),
        (["recipe", "nope"], "There is no recipe `nope`"),
        (["generate", "base"], "base is no checkpoint"),
        (["generate", "nowhere/at/all"], "is no checkpoint"),
        (["plam"], "plan"),
    ]:
        done = built.ratchet(*arguments, check=2)
        assert said in done.stderr, arguments
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 5


def test_broken_files_are_named_with_what_to_do(built: Toy) -> None:
    lock, params, graph = ((built.root / n).read_text() for n in ("dvc.lock", "params.yaml", "dvc.yaml"))
    cases = [
        ("dvc.lock", "<<<<<<< HEAD\n" + lock, "git checkout dvc.lock"),
        ("dvc.lock", "schema: '2.0'\nstages: 3\n", "are not a mapping of stages"),
        ("dvc.lock", "schema: '9.0'\nstages: {}\n", "schema 9.0, 2.0 is expected"),
        ("dvc.lock", "schema: '2.0'\nstages: {sft: {deps: [data/base]}}\n", "are not a mapping of stages"),
        ("dvc.lock", "", "names no schema, 2.0 is expected"),
        ("dvc.lock", b"\xff\xfe", "dvc.lock: not UTF-8 text (byte 0)"),
        ("params.yaml", params + "sft: {value: 3}\n", "the key `sft` is given twice"),
        ("params.yaml", None, "params.yaml is missing"),
        ("params.yaml", "rounds: {1: {init: data/sft}}\n", "the key 1 is not quoted"),
        ("dvc.yaml", "stages:\n  base: [\n", "dvc.yaml, line 3"),
        ("dvc.yaml", None, "is not a Ratchet project"),
    ]
    originals = {"dvc.lock": lock, "params.yaml": params, "dvc.yaml": graph}
    for name, text, said in cases:
        if text is None:
            (built.root / name).unlink()
        else:
            (built.root / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        for command in ("plan", "run"):
            done = built.ratchet(command, check=2)
            assert said in done.stderr and "Traceback" not in done.stderr, done.stderr
        (built.root / name).write_text(originals[name])
    assert built.states() == dict.fromkeys(STAGES, "fresh")


def test_a_missing_raw_input_is_named(built: Toy) -> None:
    (built.root / "data/raw/problems.txt").unlink()
    (built.root / "data/raw").rmdir()
    assert built.reasons("synthesize") == ["input data/raw is missing"]
    failed = built.ratchet("run", check=2)
    assert "synthesize reads data/raw, which does not exist" in failed.stderr


def test_a_project_without_dvc_is_told_what_to_do(toy: Toy) -> None:
    shutil.rmtree(toy.root / ".dvc")
    assert set(toy.states().values()) == {"missing"}
    assert "run `dvc init` there once" in toy.ratchet("run", check=2).stderr
    assert not (toy.root / ".dvc").exists()


def test_a_project_without_git_is_told_what_to_do_unless_dvc_does_without(toy: Toy) -> None:
    shutil.rmtree(toy.root / ".git")
    assert "run `git init` there once" in toy.ratchet("run", "base", check=2).stderr
    config = toy.root / ".dvc/config"
    config.write_text(config.read_text().replace("[core]", "[core]\n    no_scm = true"))
    toy.ratchet("run", "base")
    assert toy.states()["base"] == "fresh"


def test_the_table_names_what_went_stale_and_the_final_checkpoint(built: Toy) -> None:
    built.set("evaluate.value", 3)
    built.set("sft.value", 3)
    partial = built.ratchet("run", "sft")
    assert "Not up to date: filter, reward, rl@1, rl@2, distill, evaluate." in partial.stdout
    assert "Try next" not in partial.stdout


def test_logs_show_the_last_run_only_and_follow_ends_with_the_stage(built: Toy) -> None:
    built.ratchet("run", "base", "--force")
    shown = built.ratchet("logs", "base", "--follow")
    assert shown.stdout.count("=== base") == 1
    assert "base says hello" in shown.stdout


def test_a_recipe_keeps_comments_and_says_what_it_changed(built: Toy) -> None:
    recipes = built.root / "pipelines" / "recipes"
    recipes.mkdir(parents=True)
    (recipes / "quick.yaml").write_text("# For trying things.\nrl: {lr: 1.0e-3, clip: {high: 0.3}}\n")
    path = built.root / "params.yaml"
    text = "# mine\n" + path.read_text().replace("rl: {", "rl: {  # not so fast\n  ").replace(
        "seed: 1", "seed: 1   # of all"
    )
    path.write_text(text)
    assert "quick" in built.ratchet("recipe").stdout and "For trying things." in built.ratchet("recipe").stdout
    said = built.ratchet("recipe", "quick").stdout
    assert "rl.lr 0.0002 -> 0.001" in said and "rl.clip.high 0.28 -> 0.3" in said
    after = path.read_text()
    assert "# mine" in after and "# of all" in after
    assert yaml.safe_load(after)["rl"]["clip"] == {"low": 0.2, "high": 0.3}
    assert "already" in built.ratchet("recipe", "quick").stdout


def test_a_recipe_replaces_what_it_names_the_kind_of_and_empties_what_it_gives_empty() -> None:
    from flows.recipe import overlaid

    text = "plain: {a: 1}\nengine: {name: native, dtype: float32}\nbase: {kind: new, size: 3}\nfamilies: {sums: 1}\n"
    overlay = {
        "plain": {"b": 2},
        "engine": {"name": "native", "size": 1},
        "base": {"kind": "old", "path": "x"},
        "families": {},
    }
    assert yaml.safe_load(overlaid(text, overlay)) == {
        "plain": {"a": 1, "b": 2},
        "engine": {"name": "native", "size": 1},
        "base": {"kind": "old", "path": "x"},
        "families": {},
    }


def test_the_recipes_of_the_project_are_valid(tmp_path: Path) -> None:
    from flows.recipe import overlaid, recipes
    from tasks.settings import load_params
    from tasks.yamlfile import parse_yaml, read_yaml

    params = (REPOSITORY / "params.yaml").read_text()
    assert {"small", "real/qwen3-0.6b-gsm8k", "real/qwen3-4b-gsm8k"} <= recipes(REPOSITORY).keys()
    shutil.copy(REPOSITORY / "dvc.yaml", tmp_path)
    for name, path in recipes(REPOSITORY).items():
        before, after = parse_yaml(params, name), parse_yaml(overlaid(params, read_yaml(path)), name)
        assert before != after
        assert set(before) == set(after)
        (tmp_path / "params.yaml").write_text(overlaid(params, read_yaml(path)))
        load_params(tmp_path)


def test_a_real_recipe_leaves_nothing_of_the_one_before() -> None:
    from flows.recipe import overlaid, recipes
    from tasks.yamlfile import read_yaml

    params = (REPOSITORY / "params.yaml").read_text()
    real = {name: read_yaml(path) for name, path in recipes(REPOSITORY).items() if name.startswith("real/")}
    for overlay in real.values():
        fresh = yaml.safe_load(overlaid(params, overlay))
        for other in real.values():
            behind = yaml.safe_load(overlaid(overlaid(params, other), overlay))
            assert _without_nulls(behind) == _without_nulls(fresh)


def _without_nulls(value):
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(part) for key, part in value.items() if part is not None}
