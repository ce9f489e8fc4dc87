"""Students work on copies: `python -m gpt2lab.classroom.copies [FOLDER]` brings the lessons there, over nothing.

So running a lesson changes no file of the checkout, and an update of the checkout changes nothing that was typed.
"""

import json
import sys
from pathlib import Path

from . import NOTEBOOKS, WORK


def bring(notebooks: Path, folder: Path) -> list[Path]:
    """Copy each lesson of which this version is not there yet; returns the new files.

    The first copy keeps the lesson's name; one of a later version stands beside it as `07_pipeline_2.ipynb`, with the
    answers typed before, where the exercise is the same. Raises ValueError where there are no lessons.
    """
    lessons, new = sorted(notebooks.glob("[0-9][0-9]_*.ipynb")), []
    if not lessons:
        raise ValueError(f"There are no lessons in {notebooks}: they are in a checkout of gpt2lab.")
    folder.mkdir(parents=True, exist_ok=True)
    version = lambda notebook: notebook.get("metadata", {}).get("gpt2lab", {}).get("sha256")
    for lesson in lessons:
        copies = [lesson.name, *(f"{lesson.stem}_{i}.ipynb" for i in range(2, 1000))]
        there = [folder / name for name in copies if (folder / name).exists()]
        there.sort(key=lambda file: file.stat().st_mtime_ns)  # a student may go on in the first one
        found, text = [_read(file) for file in there], lesson.read_text(encoding="utf-8")
        wanted = json.loads(text)
        if any(version(one) == version(wanted) for one in found):
            continue
        _fill(wanted, found)
        new.append(next(folder / name for name in copies if not (folder / name).exists()))
        with new[-1].open("x", encoding="utf-8") as file:
            file.write(json.dumps(wanted, indent=1, ensure_ascii=False) + "\n" if found else text)
    return new


def _read(file: Path) -> dict:
    """A notebook; an empty one where a student's file cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return found if isinstance(found["cells"], list) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def exercises_in(cells: list[dict]) -> list[dict]:
    """The cells of exercises among those of a notebook."""
    return [cell for cell in cells if "exercise" in cell.get("metadata", {}).get("tags", ())]


def _fill(notebook: dict, olds: list[dict]) -> None:
    """Take over what was typed into exercises that both have, by their ids, the last, without what they printed."""
    olds = [cell for old in olds for cell in exercises_in(old.get("cells", []))]
    for cell in exercises_in(notebook["cells"]):
        blank = "".join(cell["source"])
        for old in olds:
            if old.get("id") == cell["id"] and "".join(old["source"]) != blank:
                cell |= {"source": old["source"], "outputs": [], "execution_count": None}


def left_behind(new: Path) -> dict[Path, int]:
    """Other copies of a new one's lesson -> how many of their answers are to exercises that it does not have."""
    has, found = {cell["id"] for cell in exercises_in(_read(new)["cells"])}, {}
    for file in sorted(new.parent.glob(f"{new.stem.rpartition('_')[0]}*.ipynb")):
        cells = [cell for cell in exercises_in(_read(file).get("cells", [])) if cell.get("id") not in has]
        found[file] = sum("NotImplementedError" not in "".join(cell["source"]) for cell in cells)
    return {file: n for file, n in found.items() if n}


def main(arguments: list[str]) -> None:
    """Say where the lessons are, and which are new beside others."""
    folder = Path(*arguments) if arguments else WORK
    for file in bring(NOTEBOOKS, folder):
        if file.stem.rsplit("_", 1)[-1].isdecimal():
            print(f"An updated lesson, with your answers: {file}. The one you worked in is as it was.")
            for old, n in left_behind(file).items():
                print(f"Not taken over, as the exercises have changed: {n} of the answers in {old}.")
    print(f"Your lessons are in {folder}: what you type there stays yours when gpt2lab is updated.")


if __name__ == "__main__":
    main(sys.argv[1:])
