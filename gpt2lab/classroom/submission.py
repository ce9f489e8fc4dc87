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
import symtable
import tokenize
import warnings
from dataclasses import dataclass
from pathlib import Path

from ..lessons.answers import exercises, setup
from ..lessons.desk import defined, split, titles
from ..lessons.source import BLANK, Lesson

LARGEST = 32 * 2**20
"""Bytes of a notebook that is still read."""

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
LONGEST = 2**20
"""Characters of an answer, with what it needs, that are still run."""

NOT_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)
"""What Python raises for a text that it cannot compile."""

TOUCHY = {"sys.modules", "gc", "ctypes", "inspect", "exercises", "importlib", "__main__", "__import__"}
TOUCHY |= {"eval", "exec", "setattr", "setprofile", "settrace", "os.write", "signal.signal", "check"}
TOUCHY |= {"__globals__", "__closure__", "_getframe", "f_back", "f_locals", "tb_frame", "torch.distributed"}
"""Names that an answer has no need of, and that could reach its own judge, or go past what counts."""


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


def as_python(source: str) -> str:
    """A cell's text as Python: commands for the notebook alone (%time, !ls) leave an empty line."""
    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for i, line in enumerate(lines):
        if line.lstrip().startswith(("%", "!")) and not _goes_on(lines[:i]):
            lines[i] = ""
    return "\n".join(lines)


def _goes_on(lines: list[str]) -> bool:
    """Whether the last statement of these lines does not end with them."""
    try:
        list(tokenize.generate_tokens(iter([f"{line}\n" for line in lines]).__next__))
    except tokenize.TokenError:  # a bracket, a text or a line is open
        return True
    except SyntaxError:
        pass
    return False


def answers(cells: list[dict], lesson: Lesson) -> list[Answer]:
    """One answer for each exercise of the lesson, in order."""
    given = set(dir(builtins)) | {name for text in setup(lesson) for name in set_names(ast.parse(text))}
    there = _definitions(cells)
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
        nodes = _parsed(text).body
        own = _kept(text, [n for n in nodes if isinstance(n, (*DEFINITIONS, ast.Assign, ast.AnnAssign))])
        whole = _helpers(own, there, given) + own
        _parsed(whole)
    except NOT_PYTHON as error:
        return Answer(*part, None, f"your cell is not Python: {str(error) or type(error).__name__}", "FAIL")
    if len(whole) > LONGEST:
        words = f"your cell and what it needs have {len(whole):,} characters, the limit is {LONGEST:,}"
        return Answer(*part, None, words, "FAIL")
    return Answer(*part, whole)


def _renamed(wanted: list[str], text: str, strange: list[str]) -> str:
    """What to say where a name that is wanted is missing and a strange one is near to it; "" where none is."""
    missing = [name for name in wanted if not re.search(rf"^(?:async def|def|class)\s+{name}\b", text, re.M)]
    near = {name: difflib.get_close_matches(name, strange, 1) for name in missing}
    told = (f"`{one[0]}` looks like `{name}`: give it that name" for name, one in near.items() if one)
    return "; ".join(told)


def _parsed(text: str) -> ast.Module:
    """The tree of a cell that Python can compile, which `ast.parse` alone does not tell; raises NOT_PYTHON."""
    compile(text, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return ast.parse(text)


def _kept(text: str, nodes: list[ast.stmt]) -> str:
    """The text with only these statements, at their lines."""
    own = {line for node in nodes for line in range(_first(node), node.end_lineno + 1)}
    return "\n".join(line if i in own else "" for i, line in enumerate(text.split("\n"), 1))


def _first(node: ast.stmt) -> int:
    """The line at which a statement begins, decorators included."""
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _definitions(cells: list[dict]) -> dict[str, str]:
    """What the cells define at last: name -> text, in the notebook's order."""
    there = {}
    for cell in cells:
        try:
            nodes = _parsed(cell["source"]).body
        except NOT_PYTHON:
            continue
        lines = cell["source"].split("\n")
        for node in nodes:
            if isinstance(node, DEFINITIONS) or (isinstance(node, ast.Assign) and not _calls(node)):
                one = "\n".join(lines[_first(node) - 1 : node.end_lineno]) + "\n"
                for name in set_names(ast.Module([node], [])):
                    there.pop(name, None)
                    there[name] = one
    return there


def _helpers(text: str, there: dict[str, str], given: set[str]) -> str:
    """Definitions of the notebook's other cells that a text needs, and before them what these need in turn."""
    at = {name: i for i, name in enumerate(there)}
    found, known, new = [], given | set_names(ast.parse(text)), [text]
    while new:
        missing = set().union(*map(outside_names, new)).difference(known) & there.keys()
        new = list(dict.fromkeys(there[name] for name in sorted(missing, key=at.get)))
        known = known.union(missing, *(set_names(ast.parse(one)) for one in new))
        found = new + found
    return "".join(found)


def _calls(node: ast.AST) -> bool:
    """Whether running a statement calls anything, functions that it only defines apart."""
    look = [node]
    for one in look:  # it grows
        if isinstance(one, ast.Call):
            return True
        look += () if isinstance(one, ast.Lambda) else ast.iter_child_nodes(one)
    return False


def set_names(tree: ast.Module) -> set[str]:
    """The names that a cell sets at its outermost level."""
    found = set()
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif hasattr(node, "name"):
            found.add(node.name)
        else:
            named = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            found |= {n.id for n in named if isinstance(n.ctx, ast.Store)}
    return found


def outside_names(text: str) -> set[str]:
    """The names that a text, or a function in it, looks up among those of its module or Python's own."""
    scopes = [symtable.symtable(text, "cell", "exec")]
    for scope in scopes:  # it grows
        scopes += scope.get_children()
    found = (s for scope in scopes for s in scope.get_symbols())
    return {s.get_name() for s in found if s.is_referenced() and s.is_global()}


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
