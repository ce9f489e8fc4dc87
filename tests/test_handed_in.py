"""Answers of solved notebooks of earlier versions of the lessons (`handed_in`) pass today's checkers.

So a hand-out that students work in stays worth its answers when the checkout is updated under it. Handed in are those
that are no solution of today.
"""

import json

import handed_in
import pytest

from gpt2lab.classroom import NOTEBOOKS, lessons_named
from gpt2lab.classroom.grade import graded
from gpt2lab.classroom.sandbox import Limits
from gpt2lab.lessons.answers import exercises

LESSONS = {lesson.name: lesson for lesson in lessons_named(NOTEBOOKS, [])}
OTHER = {  # (lesson, exercise): why its answer of then does not pass now
    ("00_start_here", "known everywhere"): "its function made the number of its tokens itself",
    ("05_zero", "a shard"): "a shard was allowed to be a view, which keeps the padded whole in memory",
    ("08_schedules", "your schedule"): "the puzzle was for three ranks",
    ("10_sequence_splitting", "merge"): "no row was hidden in both blocks",
    ("15_device_meshes", "who sends what"): "its function got the lists alone, and sent nothing",
    ("19_beyond_one_machine", "what crosses"): "no machine ended inside a group",
    ("20_trade_off_map", "a planner"): "`gpt2lab plan` found slower plans, with which it is compared",
}


def handed_in_for(lesson, notebook):
    """The notebook with the cells that differ from today's solutions; None where it has no such exercise."""
    today = {exercise.cell.solved() for exercise in exercises(lesson)}
    cells = [cell for cell in notebook["cells"] if "".join(cell["source"]) not in today]
    return notebook | {"cells": cells} if handed_in.names({"cells": cells}) else None


FOUND = {name: handed_in_for(LESSONS[name], notebook) for name, notebook in handed_in.kept().items()}


@pytest.mark.live
@pytest.mark.parametrize("name", [name for name, notebook in FOUND.items() if notebook])
def test_what_was_handed_in_long_ago_passes(name, tmp_path):
    path = tmp_path / f"{name}.ipynb"
    path.write_text(json.dumps(FOUND[name]))
    found, titles = graded(path, LESSONS[name], Limits(seconds=180)), handed_in.names(FOUND[name])
    other = {
        one["name"]: (one["status"], one["words"])
        for one in found["exercises"]
        if one["name"] in titles and one["status"] != "PASS"
    }
    assert not found["error"] and other.keys() == {title for lesson, title in OTHER if lesson == name}, other
    assert found["notes"] == ["made from another version of the lesson"], found["notes"]
