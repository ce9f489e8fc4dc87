"""Exercises with their wrong answers: solutions PASS, blanks are TODO, wrong answers FAIL with their own words.

An exercise cell defines functions and ends with check(...) lines. Cells tagged `wrong` that follow it define
the same functions again, wrongly; their first line, `# FAIL: words`, says what the verdict must contain.
"""

from dataclasses import dataclass, replace

from .desk import split, titles
from .source import Cell, Lesson


@dataclass(frozen=True)
class Exercise:
    """An exercise cell with the wrong answers and the hints that follow it."""

    cell: Cell
    wrong: tuple[Cell, ...] = ()
    hints: tuple[Cell, ...] = ()

    @property
    def titles(self) -> list[str]:
        """The names under which its cell is checked."""
        return titles(split(self.cell.solved())[1])


def exercises(lesson: Lesson) -> list[Exercise]:
    """The exercises of a lesson in order.

    Raises ValueError when a wrong answer follows no exercise or does not say what the verdict must contain, and when
    an exercise has more than two hints.
    """
    found: list[Exercise] = []
    for cell in lesson.cells:
        if "exercise" in cell.tags:
            found.append(Exercise(cell))
        elif "wrong" in cell.tags:
            if not found or not cell.text.startswith("# FAIL: "):
                first = cell.text.split("\n")[0]
                raise ValueError(
                    f'{lesson.name}: the wrong answer {first!r} must start with "# FAIL: words".'
                )
            found[-1] = replace(found[-1], wrong=(*found[-1].wrong, cell))
        elif "hint" in cell.tags:
            if not found or len(found[-1].hints) == 2:
                raise ValueError(
                    f"{lesson.name}: {cell.text[:60]!r} must be the first or second hint of an exercise."
                )
            found[-1] = replace(found[-1], hints=(*found[-1].hints, cell))
    return found


def setup(lesson: Lesson) -> list[str]:
    """What every exercise of a lesson may use: the texts of its `setup` cells."""
    return [cell.text for cell in lesson.cells if "setup" in cell.tags]


def words_of(wrong: Cell) -> str:
    """What the verdict of a wrong answer contains."""
    return wrong.text.split("\n")[0].removeprefix("# FAIL: ")


def mistake_of(wrong: Cell) -> tuple[str, str]:
    """The sentence of a wrong answer that says what is mistaken, or "" where it has none, and its code."""
    code = wrong.text.partition("\n")[2].strip()
    first, _, rest = code.partition("\n")
    return (first.removeprefix("# MISTAKE: "), rest) if first.startswith("# MISTAKE: ") else ("", code)


def as_expected(found: list[tuple[str, str, str]], expected: str) -> bool:
    """Whether verdicts hold `expected`: PASS, TODO, or the words of a wrong answer."""
    failed = [words for _, status, words in found if status == "FAIL"]
    if expected in ("PASS", "TODO"):
        return not failed and any(status == expected for _, status, _ in found)
    return any(expected in words for words in failed)
