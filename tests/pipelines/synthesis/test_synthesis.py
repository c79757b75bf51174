from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from pipelines.environments.families import FAMILIES
from pipelines.errors import UserError
from pipelines.records import DEMONSTRATION, PROBLEM, read
from pipelines.synthesis.settings import Columns, FamilyParams, Source, SynthesizeParams
from pipelines.synthesis.synthesize import make_rows, split_of, synthesize

COLUMNS = Columns(prompt="question", answer="solution")


def params(**changes) -> SynthesizeParams:
    given = {
        "families": {name: FamilyParams(levels=list(family.levels[:2])) for name, family in FAMILIES.items()},
        "train_per_level": 40,
        "test_per_level": 5,
        "test_share": 0.2,
        "steps_share": 0.4,
    }
    return SynthesizeParams(**(given | changes))


def rows(settings: SynthesizeParams, seed: int = 0, raw=None):
    return make_rows(settings, seed, raw, lambda done, total: None)


def from_file(source: Source, raw):
    return rows(params(families={}, sources=[source]), raw=raw)


def jsonl(path, *given):
    path.write_text("".join(json.dumps(row) + "\n" for row in given))


def test_counts_are_exact_per_family_level_and_split():
    problems, demonstrations, repeated = rows(params())
    counts = Counter((row["family"], row["level"], row["split"]) for row in problems)
    levels = [(name, level) for name, family in FAMILIES.items() for level in family.levels[:2]]
    wanted = {(name, level, split): n for name, level in levels for split, n in (("train", 40), ("test", 5))}
    assert counts == wanted
    assert repeated == 0
    assert len({row["id"] for row in problems}) == len(problems)
    train = {row["id"] for row in problems if row["split"] == "train"}
    assert [row["problem_id"] for row in demonstrations] == [row["id"] for row in problems if row["id"] in train]
    assert all(row["parents"] == [row["problem_id"]] for row in demonstrations)


def test_splits_of_different_seeds_do_not_overlap():
    splits: dict[str, set[str]] = {}
    for seed in range(3):
        for row in rows(params(families={"cups": FamilyParams(levels=[5])}), seed)[0]:
            splits.setdefault(row["prompt"], set()).add(row["split"])
    assert {len(found) for found in splits.values()} == {1}


def test_white_space_does_not_move_a_prompt_to_the_other_split():
    prompts = [f"how  much is\n{number}" for number in range(200)]
    splits = [split_of(prompt, 0.5) for prompt in prompts]
    assert splits == [split_of(" ".join(prompt.split()) + " ", 0.5) for prompt in prompts]
    assert 70 < splits.count("test") < 130


def test_mode_shares_follow_the_section_and_each_family_can_override_them():
    families = {"cups": FamilyParams(levels=[8], steps_share=1.0), "frog": FamilyParams(levels=[8])}
    _, demonstrations, _ = rows(params(families=families, train_per_level=400, steps_share=0.25))
    modes = Counter((row["family"], row["mode"]) for row in demonstrations)
    assert modes["cups", "steps"] == 400
    assert 70 <= modes["frog", "steps"] <= 130  # 100 expected, standard deviation 8.7
    none = rows(params(families=families | {"cups": FamilyParams(levels=[8], steps_share=0.0)}))[1]
    assert {row["mode"] for row in none if row["family"] == "cups"} == {"direct"}


def test_the_seed_changes_the_problems():
    assert rows(params(), 0)[0] != rows(params(), 1)[0]


def test_equal_runs_write_equal_bytes_whatever_the_hash_seed(tmp_path):
    code = """
import sys
from pathlib import Path
from pipelines.synthesis.settings import SynthesizeParams
from pipelines.synthesis.synthesize import synthesize
synthesize(SynthesizeParams.model_validate_json(sys.argv[1]), 0, Path("."), Path(sys.argv[2]))
"""
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        arguments = [params().model_dump_json(), str(tmp_path / seed)]
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=environment)
    for name in ("problems.parquet", "demonstrations.parquet"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_the_files_have_the_schemas_of_the_records(tmp_path):
    counts = synthesize(params(), 0, tmp_path, tmp_path / "out")
    problems = read(tmp_path / "out" / "problems.parquet", PROBLEM)
    demonstrations = read(tmp_path / "out" / "demonstrations.parquet", DEMONSTRATION)
    assert (counts["problems"], counts["demonstrations"]) == (problems.num_rows, demonstrations.num_rows)
    assert counts["problems/train"] + counts["problems/test"] == problems.num_rows


def test_more_problems_than_a_family_has_is_said():
    families = {"frog": FamilyParams(levels=[5])}  # 9 stones x 3^5 sequences of moves = 2,187 prompts
    with pytest.raises(UserError, match=r"frog level 5 has too few different problems, \d+ train problems are lacking"):
        rows(params(families=families, train_per_level=2_000, test_per_level=0, test_share=0.5))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_problems_from_a_file(tmp_path, suffix):
    given = [
        {
            "question": f"{a} plus {a}?",
            "solution": 2 * a,
            "grade": a % 3,
            "topic": "doubling",
            "shown": f"<think>{a}</think>{2 * a}",
        }
        for a in range(30)
    ]
    if suffix == "jsonl":
        jsonl(tmp_path / "mine.jsonl", *given, given[0])
    else:
        pq.write_table(pa.Table.from_pylist([*given, given[0]]), tmp_path / "mine.parquet")
    columns = Columns(prompt="question", answer="solution", level="grade", family="topic", demonstration="shown")
    source = Source(path=f"mine.{suffix}", columns=columns, verifier="numeric", verifier_args={"tolerance": 0})
    problems, demonstrations, repeated = from_file(source, tmp_path)
    assert (len(problems), repeated) == (30, 1)
    assert problems[4] | {"id": "", "split": ""} == {
        "id": "",
        "parents": [],
        "family": "doubling",
        "level": 1,
        "split": "",
        "prompt": "4 plus 4?",
        "answer": "8",
        "verifier": "numeric",
        "verifier_args": '{"tolerance": 0}',
        "source": f"file:mine.{suffix}#5",
    }
    assert {row["problem_id"] for row in demonstrations} == {row["id"] for row in problems if row["split"] == "train"}
    assert {row["mode"] for row in demonstrations} == {"file"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"question": "1+1", "solution": "2"}\n{"question": "1+2"}\n',
            r"data/raw/mine.jsonl, row 2: .*no column 'solution'",
        ),
        ('{"question": " ", "solution": "2"}\n', r"row 1: the prompt \(column 'question'\) is empty"),
        ('{"question": "1+1", "solution": null}\n', r"row 1: the answer .* is None; give a text or a number"),
        ('{"question": "1+1", "solution": "2"}\n\n{"question"\n', r"line 3: this is not JSON"),
        ("[1]\n", r"line 1: expected an object"),
        ("\n", "has no rows"),
        ('{"question": "1+1", "solution": "two"}\n', r"numeric needs a number as the known answer, not 'two'"),
    ],
)
def test_files_that_cannot_be_used_are_described(tmp_path, content, message):
    (tmp_path / "mine.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        from_file(Source(path="mine.jsonl", columns=COLUMNS, verifier="numeric"), tmp_path)


def test_a_missing_file_and_a_file_that_is_no_parquet(tmp_path):
    with pytest.raises(UserError, match=r"there is no file data/raw/none\.jsonl"):
        from_file(Source(path="none.jsonl", columns=COLUMNS, verifier="exact"), tmp_path)
    (tmp_path / "bad.parquet").write_text("no")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        from_file(Source(path="bad.parquet", columns=COLUMNS, verifier="exact"), tmp_path)


def test_a_level_that_is_no_integer_and_a_demonstration_that_is_wrong(tmp_path):
    jsonl(tmp_path / "mine.jsonl", {"question": "1+1", "solution": 2, "grade": "high", "shown": "3"})
    level = Columns(prompt="question", answer="solution", level="grade")
    with pytest.raises(UserError, match=r"the level .* is not an integer"):
        from_file(Source(path="mine.jsonl", columns=level, verifier="exact"), tmp_path)
    shown = Columns(prompt="question", answer="solution", demonstration="shown")
    with pytest.raises(UserError, match="is judged 'wrong' against the answer '2'"):
        from_file(Source(path="mine.jsonl", columns=shown, verifier="exact"), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"families": {"relay": FamilyParams(levels=[5])}}, r"there is no family 'relay'; there are chain_sum,"),
        ({"families": {"cups": FamilyParams(levels=[99])}}, "cups has the levels"),
        ({"families": {"cups": FamilyParams(levels=[5, 5])}}, "each at most once"),
        ({"families": {}}, "at least one of families and sources"),
    ],
)
def test_sections_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        params(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "../x.jsonl"}, "inside data/raw"),
        ({"path": "x.csv"}, r"\.jsonl or \.parquet"),
        ({"verifier": "exakt"}, "must be exact"),
    ],
)
def test_sources_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        Source(**({"path": "x.jsonl", "columns": COLUMNS, "verifier": "exact"} | changes))


def test_the_settings_are_light_to_import():
    code = """
import sys
import pipelines.synthesis.settings, pipelines.base.settings
assert not {"torch", "pyarrow", "transformers", "reasoning_gym", "math_verify"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
