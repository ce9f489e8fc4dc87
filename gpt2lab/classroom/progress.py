"""Which exercises pass here: what `check` has said, kept in a file beside the notebooks."""

import re
from pathlib import Path

from ..corpus.storage import read_json
from ..lessons.exercises import KEPT
from .copies import exercises_in

DAMAGED = "is damaged. Fetch it again, or delete it."


def progress(folder: Path) -> dict[str, dict[str, str]]:
    """Lesson -> exercise -> the last verdict in this folder's notebooks, or "" where it has not been tried."""
    kept = read_json(folder / KEPT, lambda kept: {**kept}, DAMAGED) if (folder / KEPT).exists() else {}
    found = {}
    for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")):
        of = found[path.stem] = {}
        texts = lambda notebook: ["".join(cell["source"]) for cell in exercises_in(notebook["cells"])]
        for text in read_json(path, texts, DAMAGED):
            # not as Python: a student may be in the middle of the cell, or use %%time
            names = re.findall(r'^check\(\s*"([^"]+)"', text, re.M)
            of |= {name: kept.get(name, "") for name in names}
    return found


def rows(folder: Path) -> list[tuple[str, str, str]]:
    """(lesson, how many exercises pass, what is left) for a table."""
    found = []
    for lesson, of in progress(folder).items():
        left = [f"{name} ({v})" if v == "FAIL" else name for name, v in of.items() if v != "PASS"]
        passed = f"{len(of) - len(left)} of {len(of)}"
        found.append((lesson.replace("_", " "), passed, ", ".join(left) or "-"))
    return found


def show_progress() -> None:
    """The table at the top of lesson 00, of the notebooks in the current folder."""
    from ..lessons import static, table

    here = Path()
    if static() or not (here / KEPT).exists():
        print(
            "No exercise has been checked here yet. Run this cell again later: it shows which of them pass."
        )
    else:
        table(rows(here), ["lesson", "exercises that pass", "left"])
