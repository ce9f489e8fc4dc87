"""Notebooks for students, in a folder of their own: exercises blank, and a page that says what to do.

gpt2lab handout 04 07 --to class/week3
"""

from pathlib import Path

from ..classroom import NOTEBOOKS, lessons_named
from ..classroom.handout import handout
from ..machine.options import Setting

OPTIONS = {
    "lessons": Setting("how their names begin, such as 04", many="+", metavar="LESSON", placed=True),
    "to": Setting("the students' folder", Path, metavar="FOLDER", needed=True),
    "notebooks": Setting("where the lessons are", Path, NOTEBOOKS),
}


def run(args) -> None:
    """Write the folder and say what is in it."""
    for file in handout(lessons_named(args.notebooks, args.lessons), args.to):
        print(file)
