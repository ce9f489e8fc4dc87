"""Verdicts are kept beside the notebooks; hints are folded, for students only, and never beside the solution."""

import json
import sys

import pytest
import submissions

from gpt2lab import cli
from gpt2lab.classroom import NOTEBOOKS, lessons_named
from gpt2lab.classroom.progress import progress, show_progress
from gpt2lab.lessons.answers import exercises
from gpt2lab.lessons.exercises import KEPT, check


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with the made-up lesson's notebook, as a kernel sees it."""
    of = submissions.lesson(tmp_path)
    (tmp_path / f"{of.name}.ipynb").write_text(json.dumps(of.notebook(student=True)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setenv("GPT2LAB_STATIC", "0")
    return tmp_path


def fails():
    raise AssertionError("no")


def test_the_last_verdict_of_each_exercise_is_kept_and_shown(work, capsys):
    assert cli.main(["progress"]) == 0
    assert "0 of 2   left: half, third" in capsys.readouterr().out
    check("half", fails)
    check("third", fails)
    check("third", lambda: None)
    capsys.readouterr()
    assert cli.main(["progress", str(work)]) == 0
    assert "07 halves" in (said := capsys.readouterr().out) and "1 of 2   left: half (FAIL)" in said
    check("half", lambda: None)
    cli.main(["progress"])
    assert "2 of 2   all pass" in capsys.readouterr().out


HALF = ["check()", "check(half)", "check([], 3)", "-" * 10**5 + "1", "x = (", "%%time", "!ls"]


@pytest.mark.parametrize("line", HALF)
def test_an_exercise_in_a_cell_that_is_half_written_or_no_python_is_counted(line, work, capsys):
    (file,) = work.glob("*.ipynb")
    said = json.loads(file.read_text())
    cell = next(c for c in said["cells"] if "exercise" in c["metadata"].get("tags", ()))
    cell["source"] = [f"{line}\n", *cell["source"]]
    file.write_text(json.dumps(said))
    assert cli.main(["progress"]) == 0 and "0 of 2   left: half, third" in capsys.readouterr().out


def test_every_exercise_of_every_lesson_is_counted():
    lessons = lessons_named(NOTEBOOKS, [])
    of = {lesson.name: [title for e in exercises(lesson) for title in e.titles] for lesson in lessons}
    assert {name: list(found) for name, found in progress(NOTEBOOKS).items()} == of


def test_the_first_lesson_shows_it(work, capsys, monkeypatch):
    show_progress()
    assert "No exercise has been checked here yet" in capsys.readouterr().out
    check("third", lambda: None)
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    show_progress()
    assert "| 07 halves | 1 of 2 | half |" in shown[0].data


def test_nothing_is_kept_where_notebooks_are_built_or_where_there_is_none(work, monkeypatch, capsys):
    monkeypatch.setenv("GPT2LAB_STATIC", "1")
    check("half", lambda: None)
    monkeypatch.setenv("GPT2LAB_STATIC", "0")
    monkeypatch.delitem(sys.modules, "ipykernel")
    check("half", lambda: None)
    assert not (work / KEPT).exists()
    assert cli.main(["progress", str(work / "notebooks")]) == 2
    assert "There are no lessons in" in capsys.readouterr().err


def test_a_torn_file_or_a_folder_that_is_read_only_does_not_stop_a_cell(work, capsys):
    (work / KEPT).write_text('{"half": ')
    check("half", lambda: None)
    assert capsys.readouterr().out == "PASS  half\n"


HINT = '\n# %% [markdown] tags=["hint"]\n# Which operator divides?\n'


def test_hints_are_folded_and_only_for_students(tmp_path):
    source = submissions.SOURCE.replace('\n# %% tags=["wrong"]', HINT + '\n# %% tags=["wrong"]', 1)
    of = submissions.lesson(tmp_path, source)
    assert [len(e.hints) for e in exercises(of)] == [1, 0]
    (cell,) = [c for c in of.notebook(student=True).cells if "operator" in c.source]
    assert cell.source == "<details><summary>Hint</summary>\n\nWhich operator divides?\n\n</details>"
    assert not [c for c in of.notebook(student=False).cells if "operator" in c.source]
    lost = submissions.SOURCE.replace('# %% tags=["setup"]', HINT + '\n# %% tags=["setup"]', 1)
    with pytest.raises(ValueError, match="must be the first or second hint"):
        exercises(submissions.lesson(tmp_path, lost))
    with pytest.raises(ValueError, match="must be text"):
        submissions.lesson(tmp_path, source.replace('[markdown] tags=["hint"]\n# W', 'tags=["hint"]\n# W'))


def test_the_first_lesson_has_a_hint_for_every_exercise():
    (lesson,) = lessons_named(NOTEBOOKS, ["00"])
    assert all(e.hints for e in exercises(lesson))
    for exercise in exercises(lesson):
        assert not any(hint.text in exercise.cell.text for hint in exercise.hints)
