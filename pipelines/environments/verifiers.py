"""Verifiers by name: is the answer after the last `</think>` right?

exact              the same text, apart from white space around it
numeric            the same number: `7`, `+7`, `007`, `7.0` and `14/2` are equal; arguments: {"tolerance": 0}
math               the same mathematical expression, by math-verify
reasoning_gym:NAME that dataset's own scorer; arguments: {"metadata": {...}}; right at a score of 1
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from pipelines.errors import UserError

_LONGEST = 2000
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[+-]?\.\d+", re.ASCII)
_RATIO = re.compile(r"([+-]?\d+)\s*/\s*(\d+)", re.ASCII)


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, its score in [0, 1], and why.

    reason: correct | wrong | no answer | unfinished | several answers | not a number | too long | not readable |
    no metadata. The last two are of reasoning-gym, whose scorers raise exceptions: over a text that they cannot read,
    which is then no right answer, and for a row that lacks what they need, which `check_answer` finds beforehand.
    """

    correct: bool
    score: float
    reason: str


CORRECT = Verdict(True, 1.0, "correct")


def _failed(reason: str) -> Verdict:
    return Verdict(False, 0.0, reason)


def final_answer(text: str) -> str | None:
    """What is to be judged: the text after the last `</think>`; None when thinking began and never ended."""
    _, closed, answer = text.rpartition("</think>")
    if "<think>" in answer or (not closed and "<think>" in text):
        return None
    return answer.strip()


def verify(
    text: str, answer: str, verifier: str, verifier_args: str | dict[str, Any] = "{}", finished: bool = True
) -> Verdict:
    """Judge one completion against the known answer.

    verifier_args: a JSON object, as text or parsed. finished: False for a completion cut by a length limit, which is
    never right: its last number may be the beginning of another one.
    Raises UserError for an unknown verifier.
    """
    judge = _judge(verifier)
    found = final_answer(text)
    if found is None or not finished:
        return _failed("unfinished")
    if not found:
        return _failed("no answer")
    if len(found) > _LONGEST:
        return _failed("too long")
    arguments = _arguments(verifier_args) if isinstance(verifier_args, str) else verifier_args
    return judge(found, answer.strip(), arguments)


def verify_batch(
    texts: Sequence[str],
    answers: Sequence[str],
    verifiers: Sequence[str],
    verifier_args: Sequence[str],
    finished: Sequence[bool] | None = None,
) -> list[Verdict]:
    """`verify` over columns of equal length, in order."""
    ends = finished if finished is not None else [True] * len(texts)
    columns = zip(texts, answers, verifiers, verifier_args, ends, strict=True)
    return [verify(text, answer, name, arguments, end) for text, answer, name, arguments, end in columns]


def named(name: str) -> bool:
    """Whether `name` has the form of a verifier; reasoning-gym is not imported to look the dataset up."""
    return name in _JUDGES or bool(re.fullmatch(r"reasoning_gym:\w+", name))


def check_verifier(name: str) -> None:
    """Raise UserError unless `name` is a verifier that can run here."""
    _judge(name)


def check_arguments(name: str, arguments: dict[str, Any]) -> None:
    """Raise ValueError unless the verifier `name` takes `arguments`. Imports nothing, as `named`."""
    takes = {"exact": None, "math": None, "numeric": "tolerance"}.get(name, "metadata")
    for argument in arguments:
        if argument != takes:
            raise ValueError(f"the verifier {name} has no argument {argument!r}; it takes {takes or 'none'}")
    tolerance = arguments.get("tolerance", 0)
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be a number >= 0, not {tolerance!r}")
    metadata = arguments.get("metadata", {})
    try:
        json.dumps(metadata, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata must be what JSON can hold ({error})") from error
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata must be a mapping, not {reprlib.repr(metadata)}")


def check_answer(answer: str, verifier: str, verifier_args: str) -> None:
    """Raise UserError unless the verifier judges the known answer itself right: no model could be right otherwise."""
    # "?", as some scorers ask for metadata only once they see another text than the answer
    reasons = [verify(text, answer, verifier, verifier_args).reason for text in (answer, "?")]
    reason = "no metadata" if "no metadata" in reasons else reasons[0]
    if reason != "correct":
        hint = " or give the metadata it needs (columns.metadata)" if verifier.startswith("reasoning_gym:") else ""
        raise UserError(f"the known answer {reprlib.repr(answer)} is judged {reason!r} by {verifier}; mend it{hint}")


@lru_cache(maxsize=4096)
def _arguments(text: str) -> dict[str, Any]:
    return json.loads(text)


Judge = Callable[[str, str, dict[str, Any]], Verdict]


@lru_cache(maxsize=256)
def _judge(name: str) -> Judge:
    if name in _JUDGES:
        return _JUDGES[name]
    if name.startswith("reasoning_gym:"):
        return _reasoning_gym(name.removeprefix("reasoning_gym:"))
    known = ", ".join([*_JUDGES, "reasoning_gym:NAME"])
    raise UserError(f"there is no verifier {name!r}; use one of {known}")


def _exact(found: str, answer: str, arguments: dict[str, Any]) -> Verdict:
    return CORRECT if found == answer else _failed("wrong")


def _numeric(found: str, answer: str, arguments: dict[str, Any]) -> Verdict:
    value, wanted = _number(found), _number(answer)
    if wanted is None:
        raise UserError(f"the verifier numeric needs a number as the known answer, not {answer!r}")
    if value is None:
        several = len(_NUMBER.findall(found)) > 1 and not _RATIO.fullmatch(found)
        return _failed("several answers" if several else "not a number")
    return CORRECT if abs(value - wanted) <= Fraction(str(arguments.get("tolerance", 0))) else _failed("wrong")


def _number(text: str) -> Fraction | None:
    """An exact number, or None. No exponents: a short text must not stand for a number that fills the memory."""
    if ratio := _RATIO.fullmatch(text):
        over, under = (Decimal(part) for part in ratio.groups())
        return Fraction(over) / Fraction(under) if under else None
    return Fraction(Decimal(text.replace(",", ""))) if _NUMBER.fullmatch(text) else None


def _math(found: str, answer: str, arguments: dict[str, Any]) -> Verdict:
    from math_verify import parse
    from math_verify import verify as equal

    parsed = parse(f"${found}$")
    if not parsed:
        return _failed("no answer")
    return CORRECT if equal(parse(f"${answer}$"), parsed) else _failed("wrong")


# Scorers of reasoning-gym 0.1.25 that evaluate the text as Python, and the texts that are safe to hand them: no names
# to call, no powers that never end. Without such a pattern the dataset is refused.
_SUM = r"(?:[\d\s+\-/().]|\*(?!\*))*"
_LIST = r"[\dA-Z_\s\[\],'\".]*"
_EVALUATED = {
    **dict.fromkeys(("countdown", "puzzle24"), _SUM),
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _LIST),
    **dict.fromkeys(("intermediate_integration", "polynomial_multiplication", "simple_integration"), None),
}


class _MissingError(Exception):
    """A scorer asked for metadata that is not there."""


class _Metadata(dict):
    """Tells what a row lacks from the KeyErrors of a scorer that stumbles over the text."""

    def __missing__(self, key: Any) -> Any:
        raise _MissingError(key)


def _reasoning_gym(dataset: str) -> Judge:
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.factory import DATASETS

    known = sorted(DATASETS.keys() - {"composite"})  # its scorer is that of the datasets it is made of
    if dataset not in known:
        raise UserError(f"reasoning-gym has no dataset {dataset!r}; it has {', '.join(known)}")
    if _EVALUATED.get(dataset, "") is None:
        raise UserError(f"the scorer of reasoning_gym:{dataset} runs an answer as a program; use another verifier")
    harmless = re.compile(_EVALUATED.get(dataset, r"[\s\S]*"))
    score_answer = get_score_answer_fn(dataset)

    def judge(found: str, answer: str, arguments: dict[str, Any]) -> Verdict:
        if not harmless.fullmatch(found):
            return _failed("not readable")
        metadata = _Metadata(arguments.get("metadata", {}))
        try:
            score = float(score_answer(found, {"answer": answer, "metadata": metadata}))
        except _MissingError:
            return _failed("no metadata")
        except (Exception, SystemExit):  # scorers parse, index and even evaluate without asking what the text is
            return _failed("not readable")
        if not math.isfinite(score):
            return _failed("not readable")
        return CORRECT if score >= 1.0 else Verdict(False, score, "wrong")

    return judge


_JUDGES: dict[str, Judge] = {"exact": _exact, "numeric": _numeric, "math": _math}
