"""Which exercises pass here: what their cells have said last.

gpt2lab progress              the lessons of the current folder, or those that `make lab` has copied into work/
gpt2lab progress week3        those of another folder
"""

from pathlib import Path

from ..classroom import NOTEBOOKS, WORK
from ..classroom.progress import rows
from ..machine.options import Setting

OPTIONS = {"folder": Setting("where the notebooks are", Path, many="?", placed=True)}


def run(args) -> None:
    """One line for each lesson."""
    here = next((x for x in (Path(), WORK) if list(x.glob("[0-9][0-9]_*.ipynb"))), NOTEBOOKS)
    found = rows(folder := args.folder or here)
    if not found:
        raise ValueError(f"There are no lessons in {folder}. Name the folder in which you work.")
    for lesson, passed, left in found:
        print(f"{lesson:28} {passed:8} {'left: ' + left if left != '-' else 'all pass'}")
