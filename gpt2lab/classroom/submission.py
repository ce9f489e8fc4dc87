"""What a student's notebook says about the exercises of a lesson: definitions, and nothing that it printed.

A notebook is read, never run. An exercise's cell is found by its id, else by the functions that it should define; what
these functions need besides is looked up by name in the notebook's other cells.
"""

import ast
import builtins
import json
import re
import stat
import symtable
from dataclasses import dataclass
from pathlib import Path

from ..lessons.answers import exercises, setup
from ..lessons.desk import defined, split, titles
from ..lessons.source import BLANK, Lesson

LARGEST = 32 * 2**20
"""Bytes of a notebook that is still read."""

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
MODULES = {"sys.modules", "gc", "ctypes", "inspect", "exercises"}
TOUCHY = MODULES | {"__globals__", "__closure__", "_getframe", "check"}
"""Names that an answer has no need of, and that could reach its own judge."""


class Unreadable(ValueError):
    """A file that is no notebook of this lesson; the message says why in one sentence."""


@dataclass(frozen=True)
class Answer:
    """What is tried for one exercise: definitions, or None where the student has written nothing."""

    titles: tuple[str, ...]
    before: str
    checks: str
    text: str | None
    words: str = ""  # why there is no text
    status: str = "TODO"


def read_notebook(path: Path, lesson: Lesson) -> tuple[list[dict], list[str]]:
    """The code cells of a notebook, each with `id` and `source`, and remarks; raises Unreadable."""
    info = path.lstat()
    if not stat.S_ISREG(info.st_mode):
        raise Unreadable("This is a link or no plain file: hand in the notebook itself.")
    if info.st_size > LARGEST:
        raise Unreadable(
            f"The file has {info.st_size / 2**20:.0f} MiB, the limit is {LARGEST / 2**20:.0f}. Clear its outputs."
        )
    try:
        notebook = json.loads(path.read_bytes().decode("utf-8-sig"))
        cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
        cells = [{"id": c.get("id", ""), "source": _plain(c["source"])} for c in cells]
        mark = notebook.get("metadata", {}).get("gpt2lab") or {}
        source = Path(mark.get("source", lesson.path.name)).stem
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"The file is not UTF-8 text (byte {error.start}). Save it again in JupyterLab."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"The file is not a notebook: {str(error)[:100]}.") from None
    if source != lesson.name:
        raise Unreadable(f"This is a notebook of lesson {source[:60]}, not of {lesson.name}.")
    old = mark.get("sha256", lesson.digest) != lesson.digest
    return cells, ["made from another version of the lesson"] if old else []


def _plain(source) -> str:
    """A cell's text as Python: commands for the notebook alone (%time, !ls) leave an empty line."""
    lines = "".join(source).replace("\r\n", "\n").split("\n")
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in lines)


def answers(cells: list[dict], lesson: Lesson) -> list[Answer]:
    """One answer for each exercise of the lesson, in order."""
    given = set(dir(builtins)) | {name for text in setup(lesson) for name in set_names(ast.parse(text))}
    return [_answer(cells, exercise.cell, given) for exercise in exercises(lesson)]


def _answer(cells, task, given: set[str]) -> Answer:
    body, checks = split(task.solved())
    before = split(task.blank())[0]
    wanted = sorted(defined(body))
    defines = re.compile(
        rf"^(?:async def|def|class)\s+(?:{'|'.join(wanted)})\b", re.M
    )  # also what is no Python
    part = tuple(titles(checks)), before, checks
    found = [c["source"] for c in cells if c["id"] == task.id]
    found += [c["source"] for c in reversed(cells) if defines.search(c["source"])]
    if not found:
        return Answer(*part, None, f"no cell defines {' or '.join(wanted)}")
    text = next((source for source in found if BLANK not in source), found[0])
    if text.split() == task.blank().split():
        return Answer(*part, None, "write it, then run this cell again")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        words = f"your cell is not Python: {error}"
        return Answer(*part, None, words, "FAIL")
    own = _kept(text, [n for n in tree.body if isinstance(n, (*DEFINITIONS, ast.Assign, ast.AnnAssign))])
    return Answer(*part, _helpers(own, cells, given) + own)


def _kept(text: str, nodes: list[ast.stmt]) -> str:
    """The text with only these statements, at their lines."""
    own = set()
    for node in nodes:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        own |= set(range(first, node.end_lineno + 1))
    return "\n".join(line if i in own else "" for i, line in enumerate(text.split("\n"), 1))


def _helpers(text: str, cells: list[dict], given: set[str]) -> str:
    """Definitions of the notebook's other cells that a text needs, and what these need in turn."""
    there = {}  # name -> its last definition
    for cell in cells:
        try:
            nodes = ast.parse(cell["source"]).body
        except (SyntaxError, ValueError):
            continue
        for node in nodes:
            if isinstance(node, DEFINITIONS) or (isinstance(node, ast.Assign) and not _calls(node)):
                one = _kept(cell["source"], [node]).strip("\n") + "\n"
                there |= dict.fromkeys(set_names(ast.Module([node], [])), one)
    found, known = "", given | set_names(ast.parse(text))
    while missing := sorted((outside_names(found + text) - known) & there.keys()):
        found = "".join(dict.fromkeys(there[name] for name in missing)) + found
        known |= set(missing) | set_names(ast.parse(found))
    return found


def _calls(node: ast.AST) -> bool:
    """Whether running a statement calls anything, functions that it only defines apart."""
    if isinstance(node, ast.Lambda):
        return False
    return isinstance(node, ast.Call) or any(_calls(child) for child in ast.iter_child_nodes(node))


def set_names(tree: ast.Module) -> set[str]:
    """The names that a cell sets at its outermost level."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif hasattr(node, "name"):
            found.add(node.name)
        else:
            found |= {
                n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
    return found


def outside_names(text: str) -> set[str]:
    """The names that a text, or a function in it, looks up among those of its module or Python's own."""
    scopes = [symtable.symtable(text, "cell", "exec")]
    for scope in scopes:  # it grows
        scopes += scope.get_children()
    return {
        s.get_name() for scope in scopes for s in scope.get_symbols() if s.is_referenced() and s.is_global()
    }


def touches(text: str) -> list[str]:
    """What an answer names although it could reach the grader with it: for a teacher's eye, no verdict."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            paths = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            found |= {p for p in paths if p in TOUCHY or re.match(r"gpt2lab\.(lessons|classroom)", p)}
        elif isinstance(node, ast.Attribute):
            found |= {name for name in (node.attr, ast.unparse(node)) if name in TOUCHY}
        elif isinstance(node, ast.Name) and node.id in TOUCHY:
            found.add(node.id)
    return sorted(found)
