"""What knows the answers: it comes to a judge in its job, from there to ranks by value, and no answer's process has it.

A sandbox shows the files of those modules of `lessons.exercises` that know of no lesson (SHOWN). The others come as
texts, which the judge imports (`carry`). An answer's process, a fork of the judge, forgets them before it runs one.
"""

import importlib.abc
import importlib.util
import linecache
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType

import cloudpickle

ROOM = f"{__package__.rpartition('.')[0]}.lessons.exercises"
FOLDER = Path(__file__).parents[1] / "lessons" / "exercises"
PLAIN = "__init__", "differences", "engine", "guards", "pretended", "ranked", "watching"
"""Modules of FOLDER that hold no lesson's answers."""
SHOWN = (*(f"{name}.py" for name in PLAIN), "known.json")
"""Files of FOLDER that a sandbox shows; the last finds sentences about wrong answers by digests of what these give."""


def texts() -> dict[str, str]:
    """The text of every module of a lesson's checkers, by its name."""
    files = [file for file in FOLDER.glob("*.py") if file.name not in SHOWN]
    return {f"{ROOM}.{file.stem}": file.read_text(encoding="utf-8") for file in files}


class Carried(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports these modules from texts."""

    def __init__(self, texts: dict[str, str]):
        self.texts = texts

    def find_spec(self, name: str, path=None, target=None):
        """Where a module comes from; None for one that is not here."""
        known = name in self.texts
        return importlib.util.spec_from_file_location(name, _file(name), loader=self) if known else None

    def get_source(self, name: str) -> str:
        """The text of a module."""
        return self.texts[name]

    def get_code(self, name: str) -> CodeType:
        """The code of a module, which says the file that it was written in."""
        return self.source_to_code(self.texts[name], _file(name))


def _file(name: str) -> str:
    return str(FOLDER / f"{name.rpartition('.')[2]}.py")


def carry(texts: dict[str, str]) -> None:
    """From now on these modules are imported from texts."""
    sys.meta_path.insert(0, Carried(texts))


def modules() -> list:
    """The modules of lessons' checkers that this process has imported."""
    return [
        m for n, m in sys.modules.items() if n.startswith(f"{ROOM}.") and n.rpartition(".")[2] not in PLAIN
    ]


def by_value() -> None:
    """What this process sends to ranks takes along the functions that it needs, and ranks import no checker."""
    for module in modules():
        cloudpickle.register_pickle_by_value(module)


def forget() -> None:
    """For good, in this process: no task knows what is right, and neither does a function by which one did."""
    for finder in sys.meta_path:
        if isinstance(finder, Carried):
            finder.texts.clear()
    for file in [name for name in linecache.cache if name.startswith(str(FOLDER))]:
        del linecache.cache[file]
    ours, seen, look = {module.__name__: module for module in modules()}, set(), []
    for task in (
        one for module in ours.values() for one in vars(module).values() if hasattr(one, "mistakes")
    ):
        look += [task.right, *task.mistakes.values()]
        object.__setattr__(task, "right", _gone)
        object.__setattr__(task, "mistakes", {})
    for one in look:  # it grows
        if id(one) in seen:
            continue
        seen.add(id(one))
        look += [one.func, *one.args] if isinstance(one, partial) else [getattr(one, "__wrapped__", None)]
        if isinstance(one, FunctionType) and one.__module__.startswith(ROOM):
            look += [one.__globals__.get(name) for name in _names(one.__code__)]
            for cell in one.__closure__ or ():
                with suppress(ValueError):  # it is empty
                    look.append(cell.cell_contents)
                cell.cell_contents = _gone
            if one.__module__ in ours:
                one.__code__ = _gone.__code__.replace(co_freevars=one.__code__.co_freevars)


def _gone(*_, **__):
    raise AssertionError("this knows the answer, and it is closed here. Write it yourself")


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            yield from _names(inside)
