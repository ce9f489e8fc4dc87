"""What a lesson defines in its own cells, for tests that call it: with a mistake in its text, where one is given."""

import ast
from functools import cache
from pathlib import Path

from gpt2lab.lessons.answers import setup
from gpt2lab.lessons.desk import Desk
from gpt2lab.lessons.source import read_lesson

SOURCES = Path(__file__).parents[1] / "notebooks" / "src"


@cache
def lesson(number: str):
    """The lesson whose number this is."""
    return read_lesson(next(SOURCES.glob(f"{number}_*.py")))


def definitions(number: str, *texts: str, bugs=()) -> dict:
    """The names of a lesson's set-up, and the functions and constants of the cells that contain these texts.

    `bugs` are pairs (right, wrong): text that stands once in these cells, and what stands there instead.
    """
    desk = Desk(lesson(number).name, setup(lesson(number)))
    whole = "\n".join(_cells(number, *texts))
    for right, wrong in bugs:
        assert whole.count(right) == 1, f"{right!r} stands there {whole.count(right)} times"
        whole = whole.replace(right, wrong)
    tree = ast.parse(whole)
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


def _cells(number: str, *texts: str) -> list[str]:
    """The first code cell that contains each of these texts."""
    return [next(c.text for c in lesson(number).cells if c.kind == "code" and t in c.text) for t in texts]


def _defines(node: ast.stmt) -> bool:
    constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.FunctionDef | ast.ImportFrom)
