"""report.html: one harmless file with the same bytes, whatever the completions say."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace as Builders

import pyarrow as pa
import pytest

from pipelines.evaluate import plots, report, summary, transcripts
from pipelines.records import ROLLOUT, table

SEED = {"seed": 7, "resamples": 100}
VOID = {"meta", "img", "line", "circle", "br"}
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Page(HTMLParser):
    """Reads a page, checks that its tags are balanced, and keeps what it is made of."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for key, value in attrs:
            if key in ("src", "href", "srcset", "action"):
                self.addresses.append(value or "")
            if key.startswith("on"):
                self.handlers.append(key)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def render(samples: dict, problems: pa.Table, shown: int = 2, drawn: dict | None = None, **parents: str) -> str:
    metrics = summary.summarise(
        samples, parameters={name: 1000 * (i + 1) for i, name in enumerate(samples)}, parents=parents or None, **SEED
    )
    drawn = {"accuracy": PNG} if drawn is None else drawn
    return report.render(metrics, drawn, samples, problems, transcripts=shown)


def test_the_page_is_complete_and_needs_nothing_else(problems: pa.Table, checkpoints: dict, parameters: dict) -> None:
    metrics = summary.summarise(checkpoints, parameters=parameters, **SEED)
    drawn = plots.draw(metrics)
    text = report.render(metrics, drawn, checkpoints, problems, transcripts=1)
    page = Page(text)
    assert page.handlers == []
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "base", "form"}
    images = [address for address in page.addresses if not address.startswith("#")]
    assert [base64.b64decode(image.removeprefix("data:image/png;base64,")) for image in images] == [
        drawn[name] for name in ("accuracy", "levels", "pass_at_k")
    ]
    assert "default-src 'none'" in text
    targets = re.findall(r'<h2 id="([^"]+)"', text)
    assert [address[1:] for address in page.addresses if address.startswith("#")] == targets
    for name, one in metrics["checkpoints"].items():
        row = re.search(rf"<tr><th>{name}</th>(.*?)</tr>", text)[1]
        assert row.startswith(f"<td>{100 * one['accuracy']['mean']:.1f}% <small>[")
    assert f"{parameters['student']:,}" in text


def test_the_headline_is_the_result(build: Builders, problems: pa.Table) -> None:
    sft, better = build.samples(problems, 0.0), build.samples(problems, 1.0)
    assert "<h1>rl@1 answers 100.0% of held-out problems correctly, 100.0 points more than sft</h1>" in render(
        {"sft": sft, "rl@1": better}, problems
    )
    assert "<h1>rl@1 answers 0.0% of held-out problems correctly, 100.0 points less than sft</h1>" in render(
        {"sft": better, "rl@1": sft}, problems
    )
    assert "correctly, not clearly different from sft</h1>" in render({"sft": sft, "rl@1": sft}, problems)
    assert "<h1>sft answers 0.0% of held-out problems correctly</h1>" in render({"sft": sft}, problems)


def test_two_renderings_are_equal_and_hold_nothing_of_this_machine(problems: pa.Table, checkpoints: dict) -> None:
    first = render(checkpoints, problems)
    assert render(dict(checkpoints), problems) == first
    assert str(Path(__file__).parents[3]) not in first and str(Path.home()) + "/" not in first


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_one_problem_one_sample_one_checkpoint_without_reward_model(build: Builders, rate: float) -> None:
    problems = build.problems(per_level=1, families=("only",), levels=1)
    page = Page(render({"base": build.samples(problems, rate, samples=1, scored=False)}, problems))
    assert "1 held-out problem, each answered 1 time" in page.text
    assert "best of" not in page.text and "score" not in page.text
    assert "Comparisons" not in page.text


def test_a_checkpoint_that_was_not_scored_has_no_best_of_n(build: Builders, problems: pa.Table) -> None:
    samples = {"base": build.samples(problems, 0.5, scored=False), "sft": build.samples(problems, 0.5)}
    text = render(samples, problems)
    assert "<td>–</td>" in text and "best of 4" in text


HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></article><h1>won</h1>",
    '"><img src=x onerror=alert(1)>',
    "<think>&lt;b&gt; &amp; <b>bold</b></think><i>7</i>",
    "mixed ' \" quotes",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_completions_are_text_and_nothing_else(build: Builders, text: str) -> None:
    (row,) = build.problems(per_level=1, families=("only",), levels=1).to_pylist()
    row |= {"prompt": text, "answer": text, "family": text, "id": "hostile"}
    problems = table([row], build.problems().schema)
    rollout = build.rollout(row | {"answer": "1"}, 0, False, text=text, verdict=text)
    samples = {text: table([rollout], ROLLOUT)}
    source = render(samples, problems)
    page = Page(source)
    assert page.handlers == [] and not page.tags & {"script", "i"}
    assert source.count("<h1>") == 1
    assert page.text.count(re.sub(r"\s+", " ", text)) >= 5  # checkpoint, family, prompt, answer and verdict
    shown = page.text.replace(" ", "")
    assert text.replace(" ", "") in shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("naïve 日本語 🙂 ∑", "naïve 日本語 🙂 ∑"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("bell\x07 nul\x00 escape\x1b return\r", "bell␇ nul␀ escape␛ return␍"),
        ("evil \u202etxt", "evil ⟨U+202E⟩txt"),
        ("a\u2028b\u0085c\u200fd", "a⟨U+2028⟩b⟨U+0085⟩c⟨U+200F⟩d"),
        ("<&>\"'", "&lt;&amp;&gt;&quot;&#x27;"),
    ],
)
def test_what_would_be_invisible_or_reorder_the_line_is_shown(text: str, shown: str) -> None:
    assert transcripts.visible(text) == shown


def test_transcripts_span_the_levels_and_ignore_the_results(build: Builders) -> None:
    problems = build.problems(per_level=4, families=("a", "b"), levels=5)
    chosen = transcripts.chosen(problems, 3)
    assert {family: [row["level"] for row in rows] for family, rows in chosen.items()} == {
        "a": [1, 3, 5],
        "b": [1, 3, 5],
    }
    assert [len(rows) for rows in transcripts.chosen(problems, 1000).values()] == [20, 20]
    shuffled = problems.take(pa.array(list(range(problems.num_rows))[::-1]))
    assert transcripts.chosen(shuffled, 3) == chosen


def test_the_number_of_transcripts_decides_how_many_are_shown(problems: pa.Table, checkpoints: dict) -> None:
    assert [render(checkpoints, problems, shown).count("<article>") for shown in (0, 1, 3)] == [0, 2, 6]


def test_only_problems_that_were_asked_are_shown(build: Builders, problems: pa.Table) -> None:
    asked = problems.slice(0, 3)
    assert render({"sft": build.samples(asked, 0.5)}, problems, shown=50).count("<article>") == 3


def test_a_transcript_says_what_came_of_each_sample(build: Builders) -> None:
    problems = build.problems(per_level=1, families=("only",), levels=1)
    (row,) = problems.to_pylist()
    scored = {"reward_parts": [("verifier", 0.0), ("reward_model", -1.5)]}
    rows = [
        build.rollout(row, 0, True, text="<think>1 + 0</think>1", reward_parts=[("reward_model", 0.25)]),
        build.rollout(row, 1, False, text="<think>1 + 0 =", finish_reason="length", verdict="unfinished", **scored),
        build.rollout(row, 2, False, text="", verdict="no answer", **scored),
    ]
    text = Page(render({"sft": table(rows, ROLLOUT)}, problems)).text
    assert "sft 1 of 3 right" in text
    assert "✓ right · score +0.25<think>1 + 0</think>1" in text
    assert "✗ unfinished · cut at the token limit · score −1.50<think>1 + 0 =" in text
    assert "✗ no answer · score −1.50empty" in text


def test_a_long_completion_keeps_both_ends(build: Builders) -> None:
    problems = build.problems(per_level=1, families=("only",), levels=1)
    (row,) = problems.to_pylist()
    text = "START" + "x" * 100_000 + "END"
    source = render({"sft": table([build.rollout(row, 0, False, text=text)], ROLLOUT)}, problems)
    assert "START" in source and "END" in source
    assert "[96008 characters left out]" in source
    assert len(source) < 40_000


def test_differences_are_marked_by_their_interval(build: Builders, problems: pa.Table) -> None:
    low, high = build.samples(problems, 0.0), build.samples(problems, 1.0)
    text = render({"base": low, "sft": high, "rl@1": low, "rl@2": low}, problems)
    rows = re.findall(r"<tr><th>[^\n]*?over[^\n]*?</tr>", text)
    kinds = [re.search(r'<td class="(\w+)"', row)[1] for row in rows]
    assert kinds == ["higher", "lower", "even", "lower"]  # sft/base, rl@1/sft, rl@2/rl@1, rl@2/sft
    assert "−100.0" in rows[1] and "+0.0" in rows[2]
