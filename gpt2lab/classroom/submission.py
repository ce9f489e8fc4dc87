"""What a student's notebook says about the exercises of a lesson: definitions, and nothing that it printed.

A notebook is read, never run. An exercise's cell is found by its id, else by the functions that it should define; what
these functions need besides is looked up by name in the notebook's other cells. `reading` does this with limits.
"""

import ast
import builtins
import difflib
import json
import os
import re
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path

from ..lessons.answers import exercises, setup
from ..lessons.desk import defined, split, titles
from ..lessons.source import BLANK, Lesson
from .statements import (
    NOT_PYTHON,
    as_python,
    definitions,
    helpers,
    left_out,
    needed,
    outside_names,
    parsed,
    set_names,
    text_of,
)

LARGEST = 32 * 2**20
"""Bytes of a notebook that is still read."""

LONGEST = 2**20
"""Characters of an answer, with what it needs, that are still run."""

LEFT_OUT = "your cell needs {}, which other cells compute, and of these only definitions run here. Set it in your cell"
"""What is said of names that `left_out` finds."""

TOUCHY = {"sys.modules", "gc", "ctypes", "inspect", "exercises", "importlib", "__main__", "__import__"}
TOUCHY |= {"eval", "exec", "setattr", "setprofile", "settrace", "os.write", "signal.signal", "check"}
TOUCHY |= {"__globals__", "__closure__", "_getframe", "f_back", "f_locals", "tb_frame", "torch.distributed"}
"""Names that an answer has no need of, and that could reach its own judge, or go past what counts."""


class Unreadable(ValueError):
    """A file that is no notebook of this lesson; the message says why in one sentence."""


@dataclass(frozen=True)
class Answer:
    """What is tried for one exercise: definitions, or None where the student has written nothing.

    `words` say why there is no text, or what of other cells is not run with it.
    """

    titles: tuple[str, ...]
    before: str
    checks: str
    text: str | None
    words: str = ""
    status: str = "TODO"


def notebook_bytes(path: Path) -> bytes:
    """The bytes of a notebook; raises Unreadable for a link, a pipe, what is too large or cannot be opened."""
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode):
            raise Unreadable("This is a link or no plain file: hand in the notebook itself.")
        if info.st_size > LARGEST:
            size = f"The file has {info.st_size / 2**20:.0f} MiB, the limit is {LARGEST / 2**20:.0f}."
            raise Unreadable(f"{size} Clear its outputs.")
        # A link that has come since is not followed, and a pipe not waited for.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read(LARGEST)
    except OSError as error:
        raise Unreadable(f"The file cannot be opened: {error.strerror}.") from None


def read_answers(data: bytes, lesson: Lesson) -> tuple[list[Answer], list[str]]:
    """One answer for each exercise of the lesson, in order, and remarks; raises Unreadable."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what students write
        cells, notes = read_notebook(data, lesson)
        parts = answers(cells, lesson)
        for part, exercise in zip(parts, exercises(lesson), strict=True):
            notes += [f"{part.titles[0]}: {part.words}"] if part.text and part.words else []
            named = named_beyond_the_solution(part.text, exercise) if part.text else []
            notes += [f"{part.titles[0]}: look at this answer, it names {name}" for name in named]
    return parts, notes


def read_notebook(data: bytes, lesson: Lesson) -> tuple[list[dict], list[str]]:
    """The code cells of a notebook, each with `id` and `source`, and remarks; raises Unreadable."""
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
        cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
        cells = [{"id": c.get("id", ""), "source": as_python("".join(c["source"]))} for c in cells]
        mark = notebook.get("metadata", {}).get("gpt2lab") or {}
        source = Path(mark.get("source", lesson.path.name)).stem
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"The file is not UTF-8 text (byte {error.start}). Save it again in JupyterLab."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise Unreadable(
            f"The file is not a notebook, or only a part of one ({str(error)[:100]}). Save it again in JupyterLab."
        ) from None
    if source != lesson.name:
        raise Unreadable(f"This is a notebook of lesson {source[:60]}, not of {lesson.name}.")
    old = mark.get("sha256", lesson.digest) != lesson.digest
    return cells, ["made from another version of the lesson"] if old else []


def answers(cells: list[dict], lesson: Lesson) -> list[Answer]:
    """One answer for each exercise of the lesson, in order."""
    given = set(dir(builtins)) | {name for text in setup(lesson) for name in set_names(ast.parse(text))}
    there = definitions(cells)
    ours = {name for c in lesson.cells if c.kind == "code" for name in set_names(ast.parse(c.solved()))}
    strange = [name for name, text in there.items() if name not in ours and defined(text)]
    return [_answer(cells, exercise.cell, given, there, strange) for exercise in exercises(lesson)]


def _answer(cells, task, given: set[str], there: dict[str, str], strange: list[str]) -> Answer:
    body, checks = split(task.solved())
    before = split(task.blank())[0]
    wanted = sorted(defined(body))
    # also what is no Python
    defines = re.compile(rf"^(?:async def|def|class)\s+(?:{'|'.join(wanted)})\b", re.M)
    part = tuple(titles(checks)), before, checks
    found = [c["source"] for c in cells if c["id"] == task.id]
    found += [c["source"] for c in reversed(cells) if defines.search(c["source"])]
    text = next((source for source in found if BLANK not in source), [*found, ""][0])
    if renamed := _renamed(wanted, text, strange):
        return Answer(*part, None, renamed, "FAIL")
    if not found:
        return Answer(*part, None, f"no cell defines {' or '.join(wanted)}")
    if text.split() == task.blank().split():
        return Answer(*part, None, "write it, then run this cell again")
    try:
        nodes = parsed(text).body
        own = text_of(needed(text, nodes, given), text)
        whole = helpers(own, there, given) + own
        parsed(whole)
        lost = left_out(outside_names(whole) - given - set_names(ast.parse(own)), cells, text)
    except NOT_PYTHON as error:
        return Answer(*part, None, f"your cell is not Python: {str(error) or type(error).__name__}", "FAIL")
    if len(whole) > LONGEST:
        words = f"your cell and what it needs have {len(whole):,} characters, the limit is {LONGEST:,}"
        return Answer(*part, None, words, "FAIL")
    return Answer(*part, whole, LEFT_OUT.format(", ".join(lost)) if lost else "")


def _renamed(wanted: list[str], text: str, strange: list[str]) -> str:
    """What to say where a name that is wanted is missing and a strange one is near to it; "" where none is."""
    missing = [name for name in wanted if not re.search(rf"^(?:async def|def|class)\s+{name}\b", text, re.M)]
    near = {name: difflib.get_close_matches(name, strange, 1) for name in missing}
    told = (f"`{one[0]}` looks like `{name}`: give it that name" for name, one in near.items() if one)
    return "; ".join(told)


def touches(text: str) -> list[str]:
    """What an answer names or sets although it could reach the grader with it: for a teacher's eye, no verdict."""
    tree, found = ast.parse(text), set()
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    told = [n.value for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "exercises"]
    others = outside_names(text) - set_names(tree) | set_names(ast.Module(imports, []))
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            paths = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            found |= {p for p in paths if p in TOUCHY or re.match(r"gpt2lab\.(lessons|classroom)", p)}
        elif isinstance(node, ast.Attribute):
            of = getattr(node.value, "id", "")
            found |= {name for name in (node.attr, f"{of}.{node.attr}") if name in TOUCHY}
            sets = of in others and not isinstance(node.ctx, ast.Load)
            if sets or of == "exercises" or (of in others and re.match("_[^_]", node.attr)):
                found.add(f"{of}.{node.attr}" + " =" * sets)
        elif isinstance(node, ast.Name) and node.id in TOUCHY and node not in told:
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "/proc" in node.value:
            found.add("/proc")
    return sorted(found)


def named_beyond_the_solution(text: str, exercise) -> list[str]:
    """What an answer names although it could reach the grader with it, and the exercise's solution does without."""
    ours = touches(split(exercise.cell.solved())[0])
    return [name for name in touches(text) if name not in ours]
