"""The tool that measures the tests' power: its mutants are drawn the same every time, and each is one small edit."""

import ast
import re
from collections import Counter

import pytest
from power import killing, mutate
from power.mutate import Mutant, drawn, mutants_of, planted


@pytest.fixture
def made(tmp_path, monkeypatch):
    """What the rules make of a text: (kind, right, wrong) of each mutant."""
    monkeypatch.setattr(mutate, "ROOT", tmp_path)

    def make(text: str) -> list[tuple[str, str, str]]:
        (tmp_path / "file.py").write_text(text)
        return [(m.kind, m.right, m.wrong) for m in mutants_of("file.py")]

    return make


@pytest.mark.parametrize(
    "line, expected",
    [
        ("return a - b", ("operator", "a - b", "a + b")),
        ("return 2 * (a + b)", ("operator", "2 * (a + b)", "2 + (a + b)")),
        ("return a < b", ("comparison", "a < b", "a <= b")),
        ("return a is None", ("comparison", "a is None", "a is not None")),
        ("return a and not b", ("and-or", "a and not b", "(a or (not b))")),
        ("return not a", ("not", "not a", "bool(a)")),
        ("return 7", ("constant", "7", "8")),
        ("return True", ("constant", "True", "False")),
        ("a += b", ("statement", "a += b", "pass")),
        ("send(a)", ("statement", "send(a)", "pass")),
        ("return send(a, b=1, c=f(2))", ("constant", "1", "2")),
        ("return send(a, to(b), 3)", ("arguments", "send(a, to(b), 3)", "send(to(b), a, 3)")),
    ],
)
def test_each_rule_makes_its_mistake(made, line, expected):
    assert expected in made(f"def f(a, b):\n    {line}\n")


@pytest.mark.parametrize(
    "text",
    [
        "X = 3 + 4",  # outside functions
        "def f():\n    'a text of 3 words'",
        "def f(a):\n    raise ValueError(f'{a + 1}', 2)",
        "def f(a: 3) -> 4:\n    assert a",
    ],
)
def test_what_is_no_behaviour_is_left_alone(made, text):
    assert made(text) == []


def test_letters_of_several_bytes_move_no_edit(made):
    assert made('def f(a):\n    "Größe"; return g("é", a) if a else a - 1\n')[-2:] == [
        ("operator", "a - 1", "a + 1"),
        ("constant", "1", "2"),
    ]


def test_the_same_mutants_are_drawn_every_time_and_each_is_python():
    mutants = drawn(60)
    assert mutants == drawn(60) and len({m.name for m in mutants}) == len(mutants)
    rooms = Counter(m.file.split("/")[1] for m in mutants)
    assert rooms["parallel"] == 20 and rooms["ranks"] + rooms["transport"] == 12
    for mutant in mutants:
        ast.parse(mutant.text())


def test_mutants_that_are_known_stay_and_those_that_are_gone_are_replaced():
    mutants = drawn(60)
    known = [m.name for m in mutants[::2]] + ["gpt2lab/model.py gone constant: 1 -> 2"]
    others = drawn(60, seed=1, kept=known)
    assert len(others) == 60 and {m.name for m in others} >= set(known[:-1])
    assert sum(m in mutants for m in others) < 45


def test_mutants_of_the_same_words_have_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("def f(a):\n    return a[1] + g(a)[1]\n")
    names = [m.name for m in mutants_of("a.py") if m.kind == "constant"]
    assert names == ["a.py f constant: 1 -> 2", "a.py f constant: 1 -> 2 (2)"]


def test_bugs_by_hand_are_still_where_they_can_be_planted():
    bugs = planted()
    assert len(bugs) > 60 and len({bug.name for bug in bugs}) == len(bugs)
    for bug in bugs:
        ast.parse(bug.text())
        assert bug.function, bug


def test_short_tests_that_enter_little_else_are_tried_first_within_the_seconds():
    tests = {
        "direct": {"seconds": 0.1, "functions": 5},
        "wide": {"seconds": 0.1, "functions": 500},
        "long": {"seconds": killing.SECONDS, "functions": 5},
    }
    mutant = Mutant("a.py", "f", 1, "constant", 0, 1, "1", "2")
    assert killing.candidates(mutant, tests, {"a.py f": ["wide", "long", "direct"]}) == ["direct", "wide"]
    assert killing.candidates(mutant, tests, {}) == []


def test_every_bug_by_hand_names_a_test_that_is_there():
    for bug in planted():
        file, name = bug.killer.partition("[")[0].split("::")
        assert re.search(rf"^def {name}\(", (mutate.ROOT / file).read_text(), re.M), bug


def test_a_known_killer_is_tried_first_and_where_it_sees_nothing_the_others_are():
    tried = []

    class Copy:
        def try_out(self, mutant, tests):
            tried.append(tests)
            return {"sees": ("killed", tests[0]), "hangs": ("not decided", "")}.get(tests[0], ("lives", ""))

    bug = Mutant("a.py", "f", 1, "constant", 0, 1, "1", "2", "sees")
    recorded = lambda: ({"sees": {"seconds": 1, "functions": 1}}, {"a.py f": ["sees"]})
    assert killing.decided(bug, Copy(), lambda: pytest.fail("nothing else is to be asked")) == (
        "killed",
        "sees",
    )
    endless = Mutant("a.py", "f", 1, "constant", 0, 1, "1", "2", "hangs")
    assert killing.decided(endless, Copy(), recorded) == ("killed", "hangs")
    blind = Mutant("a.py", "f", 1, "constant", 0, 1, "1", "2", "blind")
    assert killing.decided(blind, Copy(), recorded) == ("killed", "sees")
    assert tried == [["sees"], ["hangs"], ["blind"], ["sees"]]
    other = Mutant("a.py", "g", 1, "constant", 0, 1, "1", "2")
    assert killing.decided(other, Copy(), recorded) == ("not reached", "")
