"""Solved notebooks of earlier versions of the lessons, in one small file: `python tests/handed_in.py` makes it anew.

Of each lesson it is the notebook of solutions of the oldest commit whose exercises have all the names of today; an
earlier one is left as it is by a later call, so that only a lesson whose exercises have new names gets another. Kept
are the cells of exercises and of the set-up, with their ids and tags.
"""

import io
import json
import re
import tarfile
from pathlib import Path

import tiers

from gpt2lab.classroom import NOTEBOOKS, lessons_named
from gpt2lab.lessons.answers import exercises
from gpt2lab.lessons.source import Lesson

FILE = Path(__file__).with_suffix(".tar.xz")


def kept() -> dict[str, dict]:
    """The notebooks in the file, by the name of their lesson."""
    with tarfile.open(FILE) as file:
        return {m.name.removesuffix(".ipynb"): json.load(file.extractfile(m)) for m in file.getmembers()}


def names(notebook: dict) -> set[str]:
    """The names under which a notebook checks exercises."""
    text = "\n".join("".join(cell["source"]) for cell in notebook["cells"])
    return set(re.findall(r"""^check\(\s*["'](.+?)["'],""", text, re.M))


def oldest(lesson: Lesson, today: set[str]) -> dict:
    """The solved notebook of the oldest commit that has all exercises of today, or else most of them."""
    path = f"notebooks/solutions/{lesson.name}.ipynb"
    commits = tiers.git("log", "--reverse", "--diff-filter=AM", "--format=%H", "--", path)
    notebooks = (json.loads("\n".join(tiers.git("show", f"{commit}:{path}"))) for commit in commits)
    best = max(notebooks, key=lambda notebook: len(today & names(notebook)))
    own = [cell for cell in best["cells"] if {"setup", "exercise"} & set(cell["metadata"].get("tags", ()))]
    cells = [cell | {"outputs": [], "execution_count": None} for cell in own]
    return best | {"cells": cells}


if __name__ == "__main__":
    before = kept() if FILE.exists() else {}
    with tarfile.open(FILE, "w:xz", preset=9) as file:
        for lesson in lessons_named(NOTEBOOKS, []):
            today = {title for exercise in exercises(lesson) for title in exercise.titles}
            notebook = before.get(lesson.name, {"cells": []})
            notebook = oldest(lesson, today) if today - names(notebook) else notebook
            data = json.dumps(notebook, sort_keys=True).encode()
            info = tarfile.TarInfo(f"{lesson.name}.ipynb")
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
