"""What a class needs around the lessons: notebooks handed out, graded, explained to teachers, and published.

In the order of reading: `handout` (a folder for students), `copies` (the lessons in which one works), `submission`
(what a student's notebook defines) with `reading` (the process that reads it), `judge` (the process that has this
tried), `apart` (each answer in a process of its own, which its checker asks for values), with `peer` (their line),
`values` (what goes over it) and `verdicts`, `sandbox` (what all these processes may do), `grade` (a folder of
submissions) with `report` (its results as files), `progress` (what passes here), `guide` (pages for teachers), `site`
(pages to read anywhere) with `lighter` (less to load).
"""

from pathlib import Path

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
"""The lessons of the checkout that this package is run from."""
WORK = NOTEBOOKS.parent / "work"
"""Where `make lab` copies them for the student to work in."""


def lessons_named(notebooks, names) -> list:
    """The lessons under a folder, all or those whose names start with one of `names`; ValueError for a wrong name."""
    from ..lessons.build import lessons

    if not Path(notebooks, "src").is_dir():
        raise ValueError(
            f"There are no lessons in {notebooks}: they are in a checkout of gpt2lab. Say where with --notebooks."
        )
    return lessons(notebooks, names)
