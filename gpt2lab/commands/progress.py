"""Which exercises pass here: what their cells have said last.

gpt2lab progress              the lessons of the current folder, or those that `make lab` has copied into work/
gpt2lab progress week3        those of another folder
"""

from pathlib import Path

from ..classroom import NOTEBOOKS, WORK
from ..classroom.progress import rows


def add_arguments(parser) -> None:
    """The options of the command."""
    here = next((x for x in (Path(), WORK) if list(x.glob("[0-9][0-9]_*.ipynb"))), NOTEBOOKS)
    parser.add_argument("folder", nargs="?", type=Path, default=here, help="where the notebooks are")


def run(args) -> None:
    """One line for each lesson."""
    found = rows(args.folder)
    if not found:
        raise ValueError(f"There are no lessons in {args.folder}. Name the folder in which you work.")
    for lesson, passed, left in found:
        print(f"{lesson:28} {passed:8} {'left: ' + left if left != '-' else 'all pass'}")
