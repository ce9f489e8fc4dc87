"""Lessons are copied for who works in them: no update touches what was typed, or is held back by it."""

import json
import os
import subprocess

import pytest
import submissions

from gpt2lab import cli
from gpt2lab.classroom import copies
from gpt2lab.classroom.progress import progress


def lesson(folder, source=submissions.SOURCE):
    """Build the made-up lesson's notebook for students under a folder, as a checkout has it."""
    of = submissions.lesson(folder, source)
    path = of.path.parents[1] / f"{of.name}.ipynb"
    path.write_text(json.dumps(of.notebook(student=True)), encoding="utf-8")
    return path.parent


def code(file):
    return "\n".join("".join(cell["source"]) for cell in json.loads(file.read_text())["cells"])


def type_into(file, answer="    return x / 2"):
    """What a student does: the first exercise is written and run, and a cell of their own added."""
    notebook = json.loads(file.read_text())
    cell = next(c for c in notebook["cells"] if "def half" in c["source"])
    cell["source"] = cell["source"].replace('    raise NotImplementedError("your turn")', answer)
    cell |= {"execution_count": 7, "outputs": [{"output_type": "stream", "name": "stdout", "text": "PASS"}]}
    notebook["cells"].append({"cell_type": "code", "id": "mine", "source": "# mine", "metadata": {}})
    file.write_text(json.dumps(notebook))
    return file.read_bytes()


def test_a_copy_is_brought_once_and_keeps_what_is_typed(tmp_path):
    notebooks, work = lesson(tmp_path), tmp_path / "work"
    (file,) = copies.bring(notebooks, work)
    assert file.name == "07_halves.ipynb" and file.read_bytes() == (notebooks / file.name).read_bytes()
    typed = type_into(file)
    assert copies.bring(notebooks, work) == [] and file.read_bytes() == typed


def test_an_updated_lesson_stands_beside_with_the_answers(tmp_path, monkeypatch, capsys):
    notebooks, work = lesson(tmp_path), tmp_path / "work"
    (old,) = copies.bring(notebooks, work)
    typed = type_into(old)
    lesson(tmp_path, submissions.SOURCE.replace("A third of x.", "The third part of x."))
    monkeypatch.setattr(copies, "NOTEBOOKS", notebooks)
    copies.main([str(work)])
    said, new = capsys.readouterr().out, work / "07_halves_2.ipynb"
    assert f"An updated lesson, with your answers: {new}." in said and f"Your lessons are in {work}:" in said
    assert old.read_bytes() == typed and "Not taken over" not in said
    assert "return x / 2" in code(new) and "The third part" in code(new) and "# mine" not in code(new)
    assert "PASS" not in new.read_text()  # what the old one printed is not said of the new one
    assert set(progress(work)) == {"07_halves", "07_halves_2"}
    copies.main([str(work)])
    assert "An updated" not in capsys.readouterr().out


@pytest.mark.parametrize("typed", [[0], [1], [0, 1], [1, 0]])
def test_what_was_typed_last_is_taken_over_from_whichever_copy(typed, tmp_path):
    """The copy of the largest number won, also where nothing had been typed into it, or less lately."""
    notebooks, there = lesson(tmp_path), []
    for words in ("third part", "third share", "third"):
        there += copies.bring(notebooks, tmp_path / "work")
        lesson(tmp_path, submissions.SOURCE.replace("A third", f"The {words}"))
    for seconds, file in enumerate(there, 8):
        os.utime(file, (seconds, seconds))
    for seconds, i in enumerate(typed):
        type_into(there[i], f"    return x / 2  # in {i}")
        os.utime(there[i], (seconds, seconds))
    (new,) = copies.bring(notebooks, tmp_path / "work")
    assert f"# in {typed[-1]}" in code(new)


@pytest.mark.parametrize(
    "text, other", [("Half of x.", "One half of x."), ("return x / 2", "return x * 0.5")]
)
def test_an_exercise_that_has_changed_is_blank_again_which_is_said(
    text, other, tmp_path, monkeypatch, capsys
):
    """A solution in other words changed it too, and the copy was said to have all answers."""
    notebooks, work = lesson(tmp_path), tmp_path / "work"
    monkeypatch.setattr(copies, "NOTEBOOKS", notebooks)
    (old,) = copies.bring(notebooks, work)
    type_into(old)
    lesson(tmp_path, submissions.SOURCE.replace(text, other))
    copies.main([str(work)])
    new = code(work / "07_halves_2.ipynb")
    assert "return x / 2" not in new and new.count("NotImplementedError") == 2
    assert f"as the exercises have changed: 1 of the answers in {old}." in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", '{"cells": 3}', '{"cells": []}', "\udcff"])
def test_a_damaged_copy_is_left_alone(text, tmp_path):
    notebooks, work = lesson(tmp_path), tmp_path / "work"
    work.mkdir()
    damaged, held = work / "07_halves.ipynb", text.encode(errors="surrogateescape")
    damaged.write_bytes(held)
    (new,) = copies.bring(notebooks, work)
    assert new.name == "07_halves_2.ipynb" and damaged.read_bytes() == held


def test_git_does_not_see_the_copies():
    kept = [f"work/{name}" for name in ("07_pipeline.ipynb", ".gpt2lab-progress.json")]
    call = ["git", "-C", str(copies.WORK.parent), "check-ignore", *kept]
    assert subprocess.run(call, capture_output=True, text=True).stdout.split() == kept


def test_where_there_are_no_lessons_nothing_is_made(tmp_path):
    with pytest.raises(ValueError, match="There are no lessons in"):
        copies.bring(tmp_path, tmp_path / "work")
    assert not list(tmp_path.iterdir())


def test_progress_is_that_of_the_copies(tmp_path, monkeypatch, capsys):
    copies.bring(lesson(tmp_path), tmp_path / "work")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr("gpt2lab.commands.progress.WORK", tmp_path / "work")
    assert cli.main(["progress"]) == 0 and "left: half, third" in capsys.readouterr().out
