"""Pictures for the sliders of a page: every explorer of a lesson, one control varied at a time, drawn in advance.

Of a lesson run only the cells that an explorer needs. Where one of them measures, the page keeps its posters. Where
one fails it keeps them too, and the error is printed.
"""

import ast
import contextlib
import io
import sys
from pathlib import Path

from ..lessons.desk import Desk
from ..lessons.source import Lesson
from ..plots.style import png
from .submission import outside_names, set_names

POSITIONS, STEPS = 5, 20
"""Values of a slider that are drawn, about, and of one called `step`."""


def draw_explorers(lesson: Lesson, folder: Path) -> dict[str, list[dict]]:
    """Draw into a folder; returns for each cell (by id) its explorers: caption, alt and frames by control."""
    found: dict[str, list[dict]] = {}
    code = [c for c in lesson.cells if c.kind == "code" and "wrong" not in c.tags and not c.on_ranks()]
    for cell in (c for c in code if "explore(" in c.text and "setup" not in c.tags):
        explorers, needed = [], _needed(cell, code)
        if any("measured" in one.tags for one in needed):
            continue  # what a stopwatch says is not drawn again

        def explore(draw, clock, caption, alt, posters=None, *, at=explorers, of=cell, **controls):
            words = f"{clock.capitalize()}: {caption}", alt
            at.append(_drawn(draw, words, controls, posters or [{}], folder, f"{of.id}-{len(at)}"))

        try:
            with contextlib.redirect_stdout(io.StringIO()):
                desk = Desk(lesson.name, [c.solved() for c in code if "setup" in c.tags])
                silent = dict.fromkeys(("show", "table", "show_source", "check"), lambda *_, **__: None)
                for one in needed:
                    desk.names |= silent | {"explore": explore}
                    desk.run(one.solved(), desk.names)
            found[cell.id] = explorers
        except Exception as error:
            what = f"{lesson.name}: no slider moves in cell {cell.id}, which raised"
            print(what, f"{type(error).__name__}: {error}", file=sys.stderr)
    return found


def _needed(last, code) -> list:
    """The cells before `last` that set what it reads, and so on, and `last` itself, in order."""
    chosen, wanted = [last], _read(last.solved())
    for cell in reversed(code[: code.index(last)]):
        if "setup" not in cell.tags and (given := set_names(ast.parse(cell.solved())) & wanted):
            chosen.insert(0, cell)
            wanted = wanted - given | _read(cell.solved())
    return chosen


def _read(text: str) -> set[str]:
    """The names that a cell needs from others: what no statement above, and no loop around, sets."""
    found, own = set(), set()
    for node in ast.parse(text).body:
        own |= set_names(ast.Module([node.target], [])) if isinstance(node, ast.For) else set()
        found |= outside_names(ast.unparse(node)) - own
        own |= set_names(ast.Module([node], []))
    return found


def _drawn(draw, words: tuple[str, str], controls: dict, posters: list, folder: Path, name: str) -> dict:
    """One explorer: frames of each control, the others at their start; and whether all its posters are among them."""
    values = {
        key: _values(control, STEPS if key == "step" else POSITIONS, [p[key] for p in posters if key in p])
        for key, control in controls.items()
    }
    start = {key: c[2] if isinstance(c, tuple) else c[0] for key, c in controls.items()}
    frames, files = {}, {}
    for key, choices in values.items():
        frames[key] = []
        for value in choices:
            arguments = start | {key: value}
            if (what := str(arguments)) not in files:
                files[what] = f"{name}-{len(files)}.png"
                _save(draw(**arguments), folder / files[what])
            said = dict(zip(("caption", "alt"), (text.format(**arguments) for text in words), strict=True))
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            frames[key].append({"value": shown, "file": files[what], **said})
    alone = all(sum(value != start[key] for key, value in poster.items()) <= 1 for poster in posters)
    places = {key: values[key].index(start[key]) for key in values}
    return {"frames": frames, "start": places, "posters": alone}


def _values(control, most: int, more: list) -> list:
    """All choices of a control, numbers in order; of a slider about so many, and its start and `more` among them."""
    if not isinstance(control, tuple):
        return list(control) if any(isinstance(x, str) for x in control) else sorted(control)
    low, high, start = control
    if all(isinstance(x, int) for x in control):
        return sorted({*range(low, high + 1, -(-(high - low + 1) // most)), high, start, *more})
    return sorted({*(round(low + (high - low) * i / (most - 1), 3) for i in range(most)), start, *more})


def _save(fig, file: Path) -> None:
    """Save a figure with twice its dots and 96 colours: flat colours, such as those of ranks, stay as they are."""
    fig.set_dpi(2 * fig.dpi)
    file.write_bytes(png(fig, 96))
