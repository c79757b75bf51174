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
from pipelines.environments.verifiers import verify
from pipelines.errors import UserError
from pipelines.records import DEMONSTRATION, PROBLEM, read
from pipelines.synthesis.settings import Columns, FamilyParams, Source, SynthesizeParams
from pipelines.synthesis.synthesize import make_rows, split_of, synthesize

COLUMNS = Columns(prompt="question", answer="solution")
FACTS = Columns(prompt="question", answer="solution", metadata="facts")
GYM = "reasoning_gym:countdown"


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
    problems, demonstrations, left_out = rows(params())
    counts = Counter((row["family"], row["level"], row["split"]) for row in problems)
    levels = [(name, level) for name, family in FAMILIES.items() for level in family.levels[:2]]
    wanted = {(name, level, split): n for name, level in levels for split, n in (("train", 40), ("test", 5))}
    assert counts == wanted
    assert left_out["repeated"] == 0
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
    problems, demonstrations, left_out = from_file(source, tmp_path)
    assert (len(problems), left_out["repeated"]) == (30, 1)
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
        (
            '{"question": "1+1", "solution": "two"}\n',
            r"mine.jsonl, row 1: .* numeric needs a number as the known answer, not 'two'",
        ),
        ('{"question": "1+1", "solution": NaN}\n', r"row 1: the answer .* is nan; give a text or a number"),
        ('{"question": "1+1", "solution": 1e40}\n', r"row 1: the answer .* more than 40 digits; give it as a text"),
        ('{"question": "\\ud800", "solution": 2}\n', r"row 1: the prompt .* has half of a surrogate pair"),
        ('{"question": "1+1", "solution": "\\ud800"}\n', r"row 1: the answer .* has half of a surrogate pair"),
        ("[" * 100_000 + "\n", r"line 1: this is not JSON"),
        (
            '{"question": "1+1", "solution": "2"}\n{"question": "1+1", "solution": "3"}\n',
            r"row 2: this prompt came up before, in data/raw/mine.jsonl, row 1, and the answers '3' and '2'",
        ),
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


def test_a_demonstration_with_half_a_character_and_text_that_is_not_utf8(tmp_path):
    jsonl(tmp_path / "mine.jsonl", {"question": "1+1", "solution": 2, "shown": "<think>\ud800</think>2"})
    shown = Columns(prompt="question", answer="solution", demonstration="shown")
    with pytest.raises(UserError, match=r"row 1: the demonstration \(column 'shown'\) has half of a surrogate pair"):
        from_file(Source(path="mine.jsonl", columns=shown, verifier="exact"), tmp_path)
    bytes_of = pa.array([b"1+1", b"\xed\xa0\x80"])
    text = pa.Array.from_buffers(pa.string(), 2, bytes_of.buffers())
    pq.write_table(pa.table({"question": text, "solution": ["2", "3"]}), tmp_path / "mine.parquet")
    with pytest.raises(UserError, match=r"mine.parquet, row 2: a value cannot be read \('utf-8'"):
        from_file(Source(path="mine.parquet", columns=COLUMNS, verifier="exact"), tmp_path)


@pytest.mark.parametrize(
    ("given", "level"),
    [(3, 3), ("3", 3), (2.0, 2), (2**31 - 1, 2**31 - 1), (2.5, None), (2**31, None), (10**30, None), (1e30, None)],
)
def test_levels_are_integers_that_the_records_can_hold(tmp_path, given, level):
    jsonl(tmp_path / "mine.jsonl", {"question": "1+1", "solution": 2, "grade": given})
    columns = Columns(prompt="question", answer="solution", level="grade")
    source = Source(path="mine.jsonl", columns=columns, verifier="exact")
    if level is None:
        with pytest.raises(UserError, match=r"row 1: the level .* is not an integer from -2147483647 to 2147483647"):
            from_file(source, tmp_path)
    else:
        assert from_file(source, tmp_path)[0][0]["level"] == level


@pytest.mark.parametrize(
    ("number", "text"),
    [("1e-7", "0.0000001"), ("1e22", "1" + "0" * 22), ("2.50", "2.5"), ("-3.0", "-3.0"), ("7", "7")],
)
def test_numbers_become_text_without_an_exponent(tmp_path, number, text):
    (tmp_path / "mine.jsonl").write_text(f'{{"question": "?", "solution": {number}}}')
    assert from_file(Source(path="mine.jsonl", columns=COLUMNS, verifier="numeric"), tmp_path)[0][0]["answer"] == text


@pytest.mark.parametrize("form", ["text", "object", "parquet"])
def test_a_column_of_metadata_reaches_the_scorer(tmp_path, form):
    given = [
        {"question": "Make 7 of 4 and 3.", "solution": "4 + 3", "facts": {"numbers": [4, 3], "target": 7}},
        {"question": "Make 8 of 6 and 2.", "solution": "6 + 2", "facts": {"numbers": [6, 2], "target": 8}},
    ]
    if form == "text":
        given = [row | {"facts": json.dumps(row["facts"])} for row in given]
    path = tmp_path / f"mine.{'parquet' if form == 'parquet' else 'jsonl'}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(given), path)
    else:
        jsonl(path, *given)
    problems, _, _ = from_file(Source(path=path.name, columns=FACTS, verifier=GYM), tmp_path)
    assert [row["verifier_args"] for row in problems] == [
        '{"metadata": {"numbers": [4, 3], "target": 7}}',
        '{"metadata": {"numbers": [6, 2], "target": 8}}',
    ]
    second = problems[1]
    for answer, right in (("2 + 6", True), ("4 + 3", False)):
        verdict = verify(answer, second["answer"], second["verifier"], second["verifier_args"])
        assert verdict.correct == right


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ("{", r"row 1: the metadata \(column 'facts'\) cannot be used \(Expecting .*\); give a JSON object"),
        ([1], r"metadata must be a mapping, not \[1\]"),
        (None, "metadata must be a mapping, not None"),
        ({"target": float("nan")}, "metadata must be what JSON can hold"),
        ({"numbers": [4, 3], "target": 8}, r"row 1: the known answer '4 \+ 3' is judged 'wrong' by reasoning_gym"),
        ({}, "row 1: the known answer .* is judged 'wrong'"),
    ],
)
def test_metadata_that_cannot_be_used(tmp_path, facts, message):
    jsonl(tmp_path / "mine.jsonl", {"question": "Make 7 of 4 and 3.", "solution": "4 + 3", "facts": facts})
    with pytest.raises(UserError, match=message):
        from_file(Source(path="mine.jsonl", columns=FACTS, verifier=GYM), tmp_path)


def test_a_prompt_has_one_answer_across_files_and_families(tmp_path):
    def source(name: str, verifier: str, *rows: dict) -> Source:
        jsonl(tmp_path / name, *rows)
        return Source(path=name, columns=COLUMNS, verifier=verifier)

    first = source("a.jsonl", "numeric", {"question": "1+1", "solution": "2"})
    same = source("b.jsonl", "exact", {"question": "1+1", "solution": "2.0"})  # equal for the first one's verifier
    problems, _, left_out = rows(params(families={}, sources=[first, same]), raw=tmp_path)
    assert ([row["verifier"] for row in problems], left_out["repeated"]) == (["numeric"], 1)
    other = source("c.jsonl", "numeric", {"question": "0+1", "solution": "1"}, {"question": "1+1", "solution": "3"})
    with pytest.raises(UserError, match=r"c.jsonl, row 2: this prompt came up before, in data/raw/a.jsonl, row 1, and"):
        rows(params(families={}, sources=[first, other]), raw=tmp_path)

    cups = {"families": {"cups": FamilyParams(levels=[5])}}
    made = rows(params(**cups))[0][0]
    wrong = source("d.jsonl", "exact", {"question": made["prompt"], "solution": "no cup"})
    with pytest.raises(UserError, match=r"the family cups: this prompt came up before, in data/raw/d.jsonl, row 1"):
        rows(params(**cups, sources=[wrong]), raw=tmp_path)
    right = source("e.jsonl", "exact", {"question": made["prompt"], "solution": made["answer"]})
    prompts = [row["prompt"] for row in rows(params(**cups, sources=[right]), raw=tmp_path)[0]]
    assert len(set(prompts)) == len(prompts) == 46


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
        ({"verifier_args": {"tolerance": 1}}, "the verifier exact has no argument 'tolerance'; it takes none"),
        ({"verifier": "numeric", "verifier_args": {"tolerence": 1}}, "no argument 'tolerence'; it takes tolerance"),
        ({"verifier": "numeric", "verifier_args": {"tolerance": "abc"}}, "tolerance must be a number >= 0, not 'abc'"),
        ({"verifier": "numeric", "verifier_args": {"tolerance": -1}}, "must be a number >= 0, not -1"),
        ({"verifier": "numeric", "verifier_args": {"tolerance": True}}, "must be a number >= 0, not True"),
        ({"verifier": GYM, "verifier_args": {"metadata": [1]}}, r"metadata must be a mapping, not \[1\]"),
        ({"columns": FACTS}, "columns.metadata is for reasoning_gym:NAME; the verifier exact reads none"),
        ({"columns": FACTS, "verifier": GYM, "verifier_args": {"metadata": {}}}, "metadata in one place"),
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


GSM = Columns(prompt="question", answer="answer", work="answer")


def gsm(name: str, **changes) -> Source:
    given = {"path": name, "columns": GSM, "verifier": "numeric", "answer_mark": "####", "family": "school"}
    return Source(**given | changes)


def test_work_and_answer_of_one_column_are_parted_at_the_mark(tmp_path):
    answer = "48/2 = <<48/2=24>>24 clips #### in May.\nIn all <<48+24=72>>72.\n#### 1,072"
    jsonl(tmp_path / "a.jsonl", {"question": "How many?", "answer": answer})
    problems, demonstrations, _ = from_file(gsm("a.jsonl", remove="<<[^<>]*>>", split="train"), tmp_path)
    assert (problems[0]["answer"], problems[0]["family"]) == ("1,072", "school")
    assert demonstrations[0]["completion"] == "<think>48/2 = 24 clips #### in May.\nIn all 72.</think>1,072"
    assert demonstrations[0]["mode"] == "file"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("no mark", "has nothing after the mark '####'"),
        ("work ####  ", "has nothing after"),
        ("so #### six", "needs a number"),
    ],
)
def test_an_unusable_row_is_refused_or_left_out(tmp_path, answer, said):
    jsonl(tmp_path / "a.jsonl", {"question": "1+1?", "answer": "so #### 2"}, {"question": "3+3?", "answer": answer})
    with pytest.raises(UserError, match=rf"a\.jsonl, row 2: .*{said}"):
        from_file(gsm("a.jsonl"), tmp_path)
    problems, _, left_out = from_file(gsm("a.jsonl", unusable="leave_out"), tmp_path)
    assert [row["prompt"] for row in problems] == ["1+1?"] and left_out["unusable"] == 1


def test_a_file_without_a_usable_row_is_an_error_even_if_rows_may_be_left_out(tmp_path):
    jsonl(tmp_path / "a.jsonl", {"question": "1+1?", "answer": "2"})
    with pytest.raises(UserError, match=r"none of its 1 rows can be used; the first: data/raw/a\.jsonl, row 1"):
        from_file(gsm("a.jsonl", unusable="leave_out"), tmp_path)


def test_what_is_held_out_as_a_file_is_in_no_training_file_however_it_is_spaced_and_listed(tmp_path):
    jsonl(tmp_path / "train.jsonl", *({"question": f"{a} + {a}?", "answer": f"so #### {2 * a}"} for a in range(20)))
    jsonl(tmp_path / "test.jsonl", *({"question": f"{a}  +  {a}?", "answer": f"so #### {2 * a}"} for a in range(5)))
    files = [gsm("train.jsonl", split="train"), gsm("test.jsonl", split="test")]
    problems, demonstrations, left_out = rows(params(families={}, sources=files), raw=tmp_path)
    assert Counter(row["split"] for row in problems) == {"train": 15, "test": 5}
    assert left_out["repeated"] == 5
    assert {row["prompt"] for row in demonstrations} == {f"{a} + {a}?" for a in range(5, 20)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": None}, "needs one of path and hub"),
        ({"hub": {"dataset": "a/b", "revision": "0" * 40, "file": "x.jsonl"}}, "needs one of path and hub"),
        ({"columns": Columns(prompt="q", answer="a"), "remove": "x"}, "names no columns.work"),
        ({"columns": Columns(prompt="q", answer="a", work="w", demonstration="d")}, "at most one of columns.work"),
        ({"columns": Columns(prompt="q", answer="a", family="f")}, "at most one of family"),
        ({"remove": "("}, "is no regular expression"),
        ({"path": None, "hub": {"dataset": "a/b", "revision": "main", "file": "x.jsonl"}}, "revision"),
        ({"path": None, "hub": {"dataset": "a/b", "revision": "0" * 40, "file": "../x.jsonl"}}, "inside"),
    ],
)
def test_sources_that_contradict_themselves_are_refused(changes, said):
    with pytest.raises(ValidationError, match=said):
        gsm("a.jsonl", **changes)


def test_a_file_of_the_hub_is_read_from_its_cache_and_must_have_the_pinned_digest(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    revision = "0123456789" * 4
    directory = tmp_path / "hub" / "datasets--some--sums" / "snapshots" / revision
    directory.mkdir(parents=True)
    jsonl(directory / "all.jsonl", {"question": "1+1?", "answer": "so #### 2"})
    hub = {"dataset": "some/sums", "revision": revision, "file": "all.jsonl"}
    problems, _, _ = from_file(gsm("", path=None, hub=hub), tmp_path)
    assert problems[0]["source"] == "hub:some/sums/all.jsonl#1"
    with pytest.raises(UserError, match=r"some/sums/all\.jsonl has the digest [0-9a-f]{64}, params\.yaml pins 0{64}"):
        from_file(gsm("", path=None, hub=hub | {"sha256": "0" * 64}), tmp_path)
    with pytest.raises(UserError, match=r"synthesize\.sources: some/sums/more\.jsonl at \d{40} could not be had"):
        from_file(gsm("", path=None, hub=hub | {"file": "more.jsonl"}), tmp_path)


def test_leave_out_means_broken_lines_and_contradictions_too(tmp_path):
    good, other = {"question": "1+1?", "answer": "one more: #### 2"}, {"question": "1+1?", "answer": "two: #### 3"}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(good)}\nnot JSON\n[1]\n{json.dumps(other)}\n")
    problems, _, left_out = from_file(gsm("a.jsonl", unusable="leave_out"), tmp_path)
    assert [row["answer"] for row in problems] == ["2"] and left_out == {"unusable": 3, "repeated": 0}


def test_the_mark_cuts_the_answers_column_only(tmp_path):
    jsonl(tmp_path / "a.jsonl", {"q": "1+1?", "a": "#### 2", "w": "#### Adding\n1 and 1 #### are 2"})
    columns = Columns(prompt="q", answer="a", work="w")
    _, demonstrations, _ = from_file(gsm("a.jsonl", columns=columns, split="train"), tmp_path)
    assert demonstrations[0]["completion"] == "<think>#### Adding\n1 and 1 #### are 2</think>2"


@pytest.mark.parametrize(
    ("answer", "said"), [("#### 2", "is empty"), ("<<a>> #### 2", "is empty"), ("a</think>7 #### 2", "holds <think>")]
)
def test_work_that_is_none_is_refused(tmp_path, answer, said):
    jsonl(tmp_path / "a.jsonl", {"question": "1+1?", "answer": answer})
    with pytest.raises(UserError, match=rf"a\.jsonl, row 1: the work \(column 'answer'\) {said}"):
        from_file(gsm("a.jsonl", remove="<<[^<>]*>>"), tmp_path)


def test_data_without_a_held_out_problem_are_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(UserError, match="no problem is held out, so no checkpoint could be evaluated"):
        synthesize(params(test_per_level=0), 0, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
