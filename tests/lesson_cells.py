"""What a lesson defines in its own cells, for tests that call it: with a mistake in its text, where one is given."""

import ast
import socket
from functools import cache

from gpt2lab.classroom import NOTEBOOKS, apart, lessons_named
from gpt2lab.lessons.answers import exercises, setup
from gpt2lab.lessons.desk import Desk, split


@cache
def lesson(number: str):
    """The lesson whose number this is."""
    return lessons_named(NOTEBOOKS, [number])[0]


def definitions(number: str, *texts: str, bugs=()) -> dict:
    """The names of a lesson's set-up, and the functions and constants of the cells that contain these texts.

    `bugs` are pairs (right, wrong): text that stands once in these cells, and what stands there instead.
    """
    desk = Desk(lesson(number).name, setup(lesson(number)))
    tree = ast.parse(_changed("\n".join(_cells(number, *texts)), bugs))
    tree.body = [node for node in tree.body if _defines(node)]
    desk.run(ast.unparse(tree), desk.names)
    return desk.names


def after(number: str, *texts: str, **names) -> dict:
    """The names of a lesson when its set-up and the cells that contain these texts have run, `names` given to them."""
    desk = Desk(lesson(number).name, setup(lesson(number)))
    desk.names |= names
    for cell in _cells(number, *texts):
        desk.run(cell, desk.names)
    return desk.names


@cache
def _solutions() -> dict:
    """The lesson and the solution of every exercise, by its title."""
    found = [(x, e) for x in lessons_named(NOTEBOOKS, []) for e in exercises(x)]
    return {title: (x, e.cell.solved()) for x, e in found for title in e.titles}


def judged(title: str, *changes, judge=Desk.verdicts) -> tuple[str, str]:
    """The verdict (status, words) on the solution of an exercise with these changes (right, wrong) in its text."""
    of, text = _solutions()[title]
    body, checks = split(text)
    ((_, *verdict),) = judge(Desk(of.name, setup(of)), body, _changed(body, changes), checks)
    return tuple(verdict)


def across(desk: Desk, before: str, answer: str, checks: str) -> list:
    """The verdicts on an answer that has a process of its own, as the grader gives them."""
    with socket.socket() as pipe:
        return apart.judged(desk, before, answer, checks, pipe.detach())[0]


def _changed(text: str, changes) -> str:
    for right, wrong in changes:
        assert text.count(right) == 1, f"{right!r} stands there {text.count(right)} times"
        text = text.replace(right, wrong)
    return text


def _cells(number: str, *texts: str) -> list[str]:
    """The first code cell that contains each of these texts."""
    return [next(c.text for c in lesson(number).cells if c.kind == "code" and t in c.text) for t in texts]


def _defines(node: ast.stmt) -> bool:
    constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.FunctionDef | ast.ImportFrom)
