"""Notebooks for students, in a folder of their own: exercises blank, and a page that says what to do.

gpt2lab handout 04 07 --to class/week3
"""

from pathlib import Path

from ..classroom import NOTEBOOKS, lessons_named
from ..classroom.handout import handout


def add_arguments(parser) -> None:
    """The options of the command."""
    parser.add_argument("lessons", nargs="+", metavar="LESSON", help="how their names begin, such as 04")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="the students' folder")
    parser.add_argument("--notebooks", type=Path, default=NOTEBOOKS, help="where the lessons are")


def run(args) -> None:
    """Write the folder and say what is in it."""
    for file in handout(lessons_named(args.notebooks, args.lessons), args.to):
        print(file)
