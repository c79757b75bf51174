from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from pipelines.environments.families import FAMILIES, lexicon
from pipelines.environments.family import MODES, demonstrate
from pipelines.environments.verifiers import verify

ROWS = """
import json, sys
from pipelines.environments.families import FAMILIES
order = sorted(FAMILIES) if sys.argv[1] == "forward" else sorted(FAMILIES, reverse=True)
made = {
    name: [[(p.prompt, p.answer, p.work) for p in (FAMILIES[name].generate(level, 7, i) for i in range(20))]
           for level in FAMILIES[name].levels]
    for name in order
}
print(json.dumps(made, sort_keys=True))
"""


def samples(name: str, count: int = 30):
    family = FAMILIES[name]
    return [family.generate(level, 3, index) for level in family.levels for index in range(count)]


def test_two_processes_with_two_hash_seeds_and_two_orders_make_equal_problems():
    def made(hash_seed: str, order: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        return subprocess.run(
            [sys.executable, "-c", ROWS, order], env=environment, check=True, capture_output=True, text=True
        ).stdout

    first = made("1", "forward")
    assert first == made("2", "backward")
    assert set(json.loads(first)) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_seed_level_and_index_each_change_the_problem(name):
    family = FAMILIES[name]
    low, high = family.levels[0], family.levels[-1]
    prompts = {
        family.generate(low, 0, 0).prompt,
        family.generate(low, 1, 0).prompt,
        family.generate(low, 0, 1).prompt,
        family.generate(high, 0, 0).prompt,
    }
    assert len(prompts) == 4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_teachers_are_right(name, mode):
    for problem in samples(name):
        text = demonstrate(problem, mode)
        assert verify(text, problem.answer, problem.verifier, problem.arguments).reason == "correct"
        assert text.startswith("<think></think>") == (mode == "direct")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_level_that_does_not_exist_is_refused(name):
    with pytest.raises(ValueError, match="levels"):
        FAMILIES[name].generate(99, 0, 0)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="aloud"):
        demonstrate(samples("cups", 1)[0], "aloud")


def test_chain_sum_answers_are_the_value_of_the_expression():
    for problem in samples("chain_sum"):
        expression = problem.prompt.removesuffix(" =").rpartition(": ")[2]
        terms = [
            int(term) for term in re.findall(r"(?:[+-] )?\d", "+ " + expression) for term in [term.replace(" ", "")]
        ]
        assert len(terms) == problem.level
        assert int(problem.answer) == sum(terms)
        assert all(0 <= sum(terms[:count]) <= 9 for count in range(1, len(terms) + 1))


def test_chain_sum_agrees_with_the_scorer_of_reasoning_gym():
    problem = samples("chain_sum", 1)[0]
    assert verify(problem.answer, problem.answer, "reasoning_gym:chain_sum").correct
    assert not verify(str(int(problem.answer) + 1), problem.answer, "reasoning_gym:chain_sum").correct


def test_remainder_answers_are_the_remainder_and_the_work_ends_with_it():
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight"]
    for problem in samples("remainder"):
        number, divisor = map(int, re.findall(r"\d+", problem.prompt))
        assert len(str(number)) == problem.level
        assert int(problem.answer) == number % divisor
        assert problem.work.split()[-1] == words[number % divisor]


def test_cups_answers_follow_the_ball():
    for problem in samples("cups"):
        swaps = re.findall(r"([A-E])-([A-E])", problem.prompt)
        hidden = {cup: cup == problem.prompt.split("cup ")[1][0] for cup in "ABCDE"}
        for one, other in swaps:
            hidden[one], hidden[other] = hidden[other], hidden[one]
        assert len(swaps) == problem.level
        assert [cup for cup, ball in hidden.items() if ball] == [problem.answer]


def test_frog_answers_follow_the_moves():
    length = {"walk": 1, "jump": 4}
    for problem in samples("frog"):
        stone = int(re.findall(r"\d", problem.prompt)[0])
        moves = re.findall("walk|jump|turn", problem.prompt)
        for index, move in enumerate(moves):
            turns = moves[:index].count("turn")
            stone += (-1) ** turns * length.get(move, 0)
        assert len(moves) == problem.level
        assert int(problem.answer) % 9 == stone % 9
        assert 1 <= int(problem.answer) <= 9


def test_the_lexicon_has_no_piece_twice_and_no_digit():
    assert len(set(lexicon())) == len(lexicon())
    assert not [piece for piece in lexicon() if re.search(r"\d", piece)]


def test_the_id_of_a_problem_depends_on_what_is_asked_and_judged_only():
    problem = samples("cups", 1)[0]
    same = FAMILIES["cups"].generate(problem.level, 3, 0)
    assert problem.id == same.id
    assert problem.id != FAMILIES["cups"].generate(problem.level, 3, 1).id
