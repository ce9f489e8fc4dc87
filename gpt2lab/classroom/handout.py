"""A folder for students: the notebooks of some lessons with blank exercises, and a page that says what to do."""

import shutil
from pathlib import Path

from ..lessons.answers import exercises
from ..lessons.build import outdated
from ..lessons.source import Lesson
from .sandbox import Limits

PAGE = Path(__file__).with_name("static") / "handout.md"


def titles_of(lesson: Lesson) -> list[str]:
    """The names of a lesson's exercises, as `check` prints them."""
    return [title for e in exercises(lesson) for title in e.titles]


def handout(lessons: list[Lesson], folder: Path) -> list[Path]:
    """Write the students' notebooks of these lessons and README.md into a folder; returns the files.

    Raises ValueError where a file of that name is there already, or a notebook is not what its source says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for lesson in lessons:
        if stale := outdated(lesson):
            raise ValueError(f"{stale[0]}. Run `make notebooks` first.")
    files = [folder / "README.md", *(folder / f"{lesson.name}.ipynb" for lesson in lessons)]
    if there := [file for file in files if file.exists()]:
        raise ValueError(f"{there[0]} is there already. Take a new folder, so that no work is lost.")
    for lesson, file in zip(lessons, files[1:], strict=True):
        shutil.copyfile(lesson.path.parents[1] / file.name, file)
    rows = [f"| [{x.name}]({x.name}.ipynb) | {len(titles_of(x))} | | |" for x in lessons]
    named = "; ".join(f"{x.name[:2]}: {', '.join(titles_of(x))}" for x in lessons)
    files[0].write_text(PAGE.read_text().format(rows="\n".join(rows), seconds=Limits().seconds, titles=named))
    return files
