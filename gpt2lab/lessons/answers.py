"""Prove exercises in one process: solutions PASS, blanks are TODO, wrong answers FAIL with their own words.

An exercise cell defines functions and ends with check(...) lines. Cells tagged `wrong` that follow it define
the same functions again, wrongly; their first line, `# FAIL: words`, says what the verdict must contain.
"""

import ast
import contextlib
import io
import linecache
from dataclasses import dataclass

from .source import Cell, Lesson


@dataclass(frozen=True)
class Exercise:
    """An exercise cell with the wrong answers that follow it."""

    cell: Cell
    wrong: tuple[Cell, ...]


def exercises(lesson: Lesson) -> list[Exercise]:
    """The exercises of a lesson in order.

    Raises ValueError when a wrong answer follows no exercise or does not say what the verdict must contain.
    """
    found: list[Exercise] = []
    for cell in lesson.cells:
        if "exercise" in cell.tags:
            found.append(Exercise(cell, ()))
        elif "wrong" in cell.tags:
            if not found or not cell.text.startswith("# FAIL: "):
                first = cell.text.split("\n")[0]
                raise ValueError(
                    f'{lesson.name}: the wrong answer {first!r} must start with "# FAIL: words".'
                )
            found[-1] = Exercise(found[-1].cell, (*found[-1].wrong, cell))
    return found


class Desk:
    """The namespace in which answers of one lesson are tried: its `setup` cells, run once."""

    def __init__(self, lesson: Lesson):
        self.lesson, self.count = lesson, 0
        self.names = {"__name__": "__main__"}  # as in a notebook, so that functions reach live ranks by value
        for cell in lesson.cells:
            if "setup" in cell.tags:
                self._run(cell.text, self.names)

    def verdict(self, exercise: Exercise, answer: str) -> str:
        """What check(...) prints for this answer, which defines the functions of the exercise."""
        names = dict(self.names)
        body, checks = split(exercise.cell.solved())
        self._run(body, names)
        self._run(answer, names)
        return self._run(checks, names)

    def _run(self, text: str, names: dict) -> str:
        self.count += 1
        file = f"<{self.lesson.name} {self.count}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, file, "exec"), names)
        return printed.getvalue()


def split(text: str) -> tuple[str, str]:
    """An exercise's text as (definitions, check lines)."""
    lines, checks = text.splitlines(), set()
    for node in ast.parse(text).body:
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "check":
            checks |= set(range(node.lineno - 1, node.end_lineno))
    return tuple(
        "\n".join(line for i, line in enumerate(lines) if (i in checks) == own) for own in (False, True)
    )


def prove(lesson: Lesson) -> list[str]:
    """Complaints about the exercises of a lesson; empty when all is well."""
    desk, complaints = Desk(lesson), []
    for exercise in exercises(lesson):
        name = exercise.cell.text.split("\n")[0]
        if not exercise.wrong:
            complaints.append(f"{name}: no wrong answer shows that its checker can fail")
        for answer, expected in [
            (split(exercise.cell.solved())[0], "PASS"),
            (split(exercise.cell.blank())[0], "TODO"),
            *((cell.text, cell.text.split("\n")[0].removeprefix("# FAIL: ")) for cell in exercise.wrong),
        ]:
            said = desk.verdict(exercise, answer)
            failed = [line for line in said.splitlines() if line.startswith("FAIL")]
            if expected in ("PASS", "TODO"):
                right = expected in said and not failed
            else:
                right = any(expected in line for line in failed)
            if not right:
                complaints.append(f"{name}: expected {expected!r}, but check said {said.strip()!r}")
    return complaints
