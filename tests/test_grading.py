"""The grader on everything that a class may hand in: each student gets the verdict that is due, whatever others do."""

import csv
import json

import pytest
import submissions

from gpt2lab import cli
from gpt2lab.classroom import NOTEBOOKS, lessons_named, report, sandbox
from gpt2lab.classroom import grade as grading
from gpt2lab.classroom.submission import answers, named_beyond_the_solution, touches
from gpt2lab.lessons.answers import as_expected, exercises, words_of
from gpt2lab.lessons.desk import split

pytestmark = pytest.mark.live
SLOW = [
    pytest.param(path.name[:2], marks=pytest.mark.slow)
    for path in sorted(NOTEBOOKS.glob("*.ipynb"))
    if path.name[:2] != "08"
]
LESSONS = ["08", *SLOW]
LIMITS = sandbox.Limits(seconds=3.0, gib=1.0)


LATE, GONE = "no end after 3 s", "the process that ran your code ended in the middle of it"
DUE = {  # student -> verdict on `half`, and the words that it has
    "good": ("PASS", ""),
    "blank": ("TODO", "write it"),
    "wrong": ("FAIL", "half of 4: expected 2, got 4"),
    "forgotten": ("FAIL", "Is the return missing?"),
    "raises": ("FAIL", "ZeroDivisionError"),
    "loops": ("FAIL", LATE),
    "sleeps deaf": ("FAIL", LATE),
    "hog": ("FAIL", "MemoryError"),
    "exits": ("FAIL", f"{GONE} (exit status 0)"),
    "kills": ("FAIL", f"{GONE} (killed by SIGKILL)"),
    "leaves": ("FAIL", "SystemExit: 0"),
    "says pass": ("FAIL", "half of 4: expected 2, got 4"),
    "gigabyte": ("PASS", ""),
    "long words": ("FAIL", "ValueError: xxx"),
    "bomb": ("FAIL", "more than "),
    "detached": ("PASS", ""),
    "helper inside": ("PASS", ""),
    "constant": ("PASS", ""),
    "own check": ("FAIL", "half of 4: expected 2, got 4"),
    "magic": ("PASS", ""),
    "operators first": ("PASS", ""),
    "a table that a call fills": ("PASS", ""),
    "a table that is filled": ("PASS", ""),
    "number elsewhere": ("PASS", ""),
    "computed elsewhere": ("FAIL", "NameError: name 'TWO' is not defined"),
    "syntax": ("FAIL", "your cell is not Python: invalid syntax"),
    "stops the cell": ("PASS", ""),
    "bad decorator": ("FAIL", "your cell does not run: NameError"),
    "stripped": ("PASS", ""),
    "duplicated": ("PASS", ""),
    "helper elsewhere": ("PASS", ""),
    "old outputs": ("FAIL", "half of 4: expected 2, got 4"),
    "deleted": ("TODO", "no cell defines half"),
    "older": ("PASS", ""),
    "Ann.ipynb": ("PASS", ""),
    "Ann/07_halves.ipynb": ("FAIL", "half of 4"),
    "group 2/Bob": ("PASS", ""),
}
APART = {
    "good",
    "wrong",
    "loops",
    "exits",
    "bomb",
    "detached",
    "older",
    "Ann.ipynb",
    "Ann/07_halves.ipynb",
    "group 2/Bob",
}
ALIKE = [student for student in DUE if student not in APART]
"""Students whose answers one sandbox tries, as if they were one student's."""
UNREAD = {
    "another lesson": "This is a notebook of lesson 04_data_parallel, not of 07_halves.",
    "broken": "The file is not a notebook",
    "list": "The file is not a notebook",
    "deep": "The file is not a notebook",
    "latin": "The file is not UTF-8 text",
    "link": "This is a link",
    "nowhere": "This is a link",
    "huge": "The file has 5120 MiB, the limit is 32",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the made-up lesson, and the class's notebooks in `class`; those that are `ALIKE` lie in `alike`."""
    folder = tmp_path_factory.mktemp("graded")
    submissions.make(submissions.lesson(folder), folder / "class")
    (folder / "alike").mkdir()
    for student in ALIKE:
        (folder / "class" / f"{student}.ipynb").rename(folder / "alike" / f"{student}.ipynb")
    return folder


def call(folder, where="class", *more):
    """`gpt2lab grade` as a teacher would call it."""
    options = ["--out", folder / "grades.csv", "--notebooks", folder / "notebooks"]
    limits = ["--seconds", LIMITS.seconds, "--memory", LIMITS.gib]
    return cli.main(["grade", "07", *map(str, [folder / where, *options, *limits, *more])])


@pytest.fixture(scope="module")
def results(home):
    """The class's results by student, from one call."""
    assert call(home, "class", "--jobs", "4") == 0
    return {r["student"]: r for r in report.known_results(home / "grades.csv", "07_halves")}


@pytest.fixture(scope="module")
def alike(home):
    """The results of those who are `ALIKE`, by student."""
    files = {student: home / "alike" / f"{student}.ipynb" for student in ALIKE}
    return submissions.together(files, submissions.lesson(home), LIMITS)


@pytest.mark.parametrize("student", DUE)
def test_every_student_gets_the_verdict_that_is_due_and_the_other_exercise_is_graded_too(
    results, alike, student
):
    result = (results | alike)[student]
    half, third = result["exercises"]
    status, words = DUE[student]
    assert half["status"] == status and words in half["words"], half
    assert (half["words"] == "") == (status == "PASS") and len(half["words"]) <= 600
    assert third["status"] == "PASS" and not result["error"], third


@pytest.mark.parametrize("student", UNREAD)
def test_what_is_no_notebook_of_the_lesson_is_told_in_a_sentence(results, student):
    assert UNREAD[student] in results[student]["error"]
    assert {e["status"] for e in results[student]["exercises"]} == {"NONE"}


def test_nobody_is_forgotten_and_nobody_added(results):
    where_it_matters = {"patches", "writes", "spies"}
    assert set(results) | set(ALIKE) == set(DUE) | set(UNREAD) | where_it_matters


def test_what_of_other_cells_is_not_run_is_told_on_the_page(alike):
    page = report.student_page(alike["computed elsewhere"] | {"student": "", "file": ""}, "07_halves", "")
    assert "Remark: half: your cell needs TWO, which other cells compute" in page
    assert {student for student, r in alike.items() if "compute" in str(r["notes"])} == {"computed elsewhere"}


def test_an_answer_that_names_its_judge_is_shown_to_the_teacher(results, alike):
    named = ["desk.verdict =", "gpt2lab.lessons.desk"]
    assert results["patches"]["notes"] == [f"half: look at this answer, it names {name}" for name in named]
    everybody = (results | alike).items()
    noted = {student for student, r in everybody if any("look at" in note for note in r["notes"])}
    assert noted == {"patches", "own check", "loops", "sleeps deaf", "gigabyte", "exits"}
    assert results["loops"]["notes"] == [
        "half: look at this answer, it did not end; on a busy machine try --seconds 9"
    ]
    assert results["older"]["notes"] == ["made from another version of the lesson"]


def test_ranks_have_started_before_an_answer_is_timed(tmp_path):
    setup = "from gpt2lab.lessons import exercises\nfrom gpt2lab.lessons.exercises import check"
    source = submissions.SOURCE.replace("from gpt2lab.lessons.exercises import check", setup)
    own = 'type("Own", (int,), {})(4)'  # cannot be told to another process, so the answer has its checker beside it
    source = source.replace("answer(4)", f"answer({own})")
    of = submissions.lesson(tmp_path, source)
    begun = "    from multiprocessing.forkserver import _forkserver as f\n"
    begun += "    return x / 2 if f._forkserver_pid else x"
    notebook = cells_of(of, lambda e: e.cell.solved().replace("    return x / 2", begun))
    (tmp_path / "ann.ipynb").write_text(json.dumps(notebook))
    found = grading.graded(tmp_path / "ann.ipynb", of, sandbox.Limits())["exercises"]
    assert [e["status"] for e in found] == ["PASS", "PASS"], found
    assert [e["apart"] for e in found] == [False, True]


def test_what_an_answer_starts_does_not_outlive_it(results):
    assert results["detached"] and not submissions.alive(submissions.SLEEPER)


def test_what_a_solution_names_an_answer_may_name():
    found = []
    for lesson in lessons_named(NOTEBOOKS, []):
        for exercise in exercises(lesson):
            solution = split(exercise.cell.solved())[0]
            found += touches(solution)
            assert named_beyond_the_solution(solution, exercise) == []
            cheat = "import gpt2lab.lessons.desk\n" + solution
            assert named_beyond_the_solution(cheat, exercise) == ["gpt2lab.lessons.desk"]
            asks = solution + "\nfound = exercises.first.right\n"
            assert "exercises.first" in named_beyond_the_solution(asks, exercise)
    assert found, "no solution names anything: then this shows nothing"


@pytest.mark.sandboxed
def test_an_answer_sees_and_changes_no_other(results, home):
    assert results["writes"]["exercises"][0]["status"] == "FAIL"
    assert results["spies"]["exercises"][0]["status"] == "FAIL"  # with what it looks for it would pass
    assert (home / "class" / "good.ipynb").stat().st_size > 1000


def test_without_namespaces_the_limits_hold_and_a_sentence_says_what_does_not(home, monkeypatch):
    monkeypatch.setattr(sandbox, "isolated", lambda: False)
    assert "could use the network" in sandbox.sentence()
    files = {s: next(home.glob(f"*/{s}.ipynb")) for s in ("good", "exits", "bomb", "detached", "hog")}
    for student, result in submissions.together(files, submissions.lesson(home), LIMITS).items():
        half, third = result["exercises"]
        status, words = DUE[student]
        assert half["status"] == status and words in half["words"] and third["status"] == "PASS", student
    assert not submissions.alive(submissions.SLEEPER)


def test_the_table_the_pages_and_the_json_say_the_same(results, home):
    with (home / "grades.csv").open() as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    assert list(rows) == sorted(rows, key=lambda s: list(results).index(s)) and set(rows) == set(results)
    assert rows["wrong"]["half"] == "FAIL" and rows["wrong"]["passed"] == "1" and rows["wrong"]["of"] == "2"
    page = (home / "grades" / "wrong.txt").read_text()
    assert "1 of 2 exercises pass." in page and "FAIL  half" in page and "expected 2, got 4" in page
    assert "PASS  third" in page and sandbox.sentence() in page
    assert len(list((home / "grades").iterdir())) == len(results)
    broken = (home / "grades" / "broken.txt").read_text()
    assert "Nothing could be graded. The file is not a notebook" in broken
    assert "NONE" not in broken and "out of reach" not in broken
    assert "look at" not in (home / "grades" / "patches.txt").read_text()  # that is for the teacher


def test_a_student_is_named_as_the_file_or_its_folder_is(tmp_path):
    of = submissions.lesson(tmp_path)
    files = ["ann.ipynb", "bo/07_made_up.ipynb", "Cy Du_12_assignsubmission_file/07_made_up.ipynb"]
    files += ["Di Du_13_assignsubmission_file_/mine.ipynb", "El Du_14_assignsubmission_file_07_made_up.ipynb"]
    files += ["frey_12_345_07_made_up-1.ipynb", "gérard_LATE_16_346_my work.ipynb", "team_3_07_made_up.ipynb"]
    for name in [f.replace("07_made_up", of.name) for f in files]:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("{}")
    assert sorted(grading.submissions(tmp_path / "in", of)) == sorted(
        ["ann", "bo", "Cy Du", "Di Du", "El Du", "frey", "gérard", f"team_3_{of.name}"]
    )


def test_a_file_whose_name_is_almost_that_of_a_notebook_is_graded_or_named(tmp_path, monkeypatch, capsys):
    """Browsers append .txt or .json to a download, and Windows does not see capitals."""
    of, place = submissions.lesson(tmp_path), tmp_path / "class"
    place.mkdir()
    for name in ("ann.IPYNB", "frey_12_345_mine.Ipynb", "bo.ipynb.txt", "cy.ipynb.json", "di.py", ".seen"):
        (place / name).write_text("{}")
    for name in ("e\x1b.zip", "gradesheet.csv"):
        (place / name).touch()
    assert set(grading.submissions(place, of)) == {"ann", "frey"}
    called = ["grade", "07", str(place), "--out", str(place / "grades.csv"), "--again"]
    monkeypatch.setattr(grading, "graded", lambda *_: {"notes": [], "error": "", "exercises": []})
    for _ in range(2):  # results that lie there by now are not named
        assert cli.main([*called, "--notebooks", str(tmp_path / "notebooks")]) == 0
        said = (
            "Not graded, as their names do not end in .ipynb: bo.ipynb.txt, cy.ipynb.json, di.py and 2 more."
        )
        assert said in capsys.readouterr().out
    assert r"e\x1b.zip" in grading.others(place, place / "grades.csv")


def test_a_second_call_goes_on_where_the_first_ended(results, home, monkeypatch, tmp_path):
    of, tried = submissions.lesson(home), []

    def spy(path, *_):
        tried.append(path.name)
        return results["good"]

    monkeypatch.setattr(grading, "graded", spy)
    files = grading.submissions(home / "class", of)
    known = list(results.values())
    moved = [r | {"file": "Ann Lee_12_assignsubmission_file/07_halves.ipynb"} for r in known]
    done = {r["student"]: r["file"] for r in grading.grade(files, of, LIMITS, 2, moved)}
    assert tried == [] and done == {student: report.plain(str(file)) for student, file in files.items()}
    changed = tmp_path / "wrong.ipynb"
    changed.write_text((home / "class" / "good.ipynb").read_text())
    done = list(grading.grade(files | {"wrong": changed}, of, LIMITS, 2, known[1:]))
    assert sorted(tried) == sorted([files[known[0]["student"]].name, "wrong.ipynb"])
    assert len(done) == len(files)
    tried.clear()
    list(grading.grade(files, of, sandbox.Limits(seconds=9, gib=1), 2, known))
    assert len(tried) == len(files)  # with another limit the verdict may be another


def test_what_is_ready_is_kept_when_the_grader_is_stopped(home, monkeypatch, tmp_path):
    def stopped(path, *_):
        if path.stem == "wrong":
            raise KeyboardInterrupt
        return {"notes": [], "error": "", "exercises": []}

    monkeypatch.setattr("gpt2lab.classroom.grade.graded", stopped)
    (tmp_path / "class").mkdir()
    for name in ("good", "wrong"):
        (tmp_path / "class" / f"{name}.ipynb").write_bytes((home / "class" / f"{name}.ipynb").read_bytes())
    submissions.lesson(tmp_path)
    assert call(tmp_path, "class", "--jobs", "1") == 130
    kept = json.loads((tmp_path / "grades.json").read_text())["results"]
    assert [r["student"] for r in kept] == ["good"]


def test_a_call_that_cannot_be_is_told_in_a_sentence(home, capsys, tmp_path):
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "good.ipynb").write_bytes((home / "class" / "good.ipynb").read_bytes())
    submissions.lesson(tmp_path)
    assert call(tmp_path, "class", "--memory", "0.01") == 2
    assert "cannot be set up within 0.01 GiB" in capsys.readouterr().err
    assert call(tmp_path, "empty") == 2 and "no notebooks (*.ipynb)" in capsys.readouterr().err


def cells_of(lesson, text_of):
    """The notebook of a student in which the cell of each exercise has the text that `text_of(exercise)` gives."""
    notebook = lesson.notebook(student=True)
    cells = {cell.id: cell for cell in notebook.cells}
    for exercise in exercises(lesson):
        cells[exercise.cell.id].source = text_of(exercise)
    return notebook


def through_the_grader(lesson, text_of, tmp_path, marked=True):
    """Verdicts on every exercise of such a notebook."""
    path = tmp_path / f"{lesson.name}.ipynb"
    path.write_text(json.dumps(cells_of(lesson, text_of)))
    found = grading.graded(path, lesson, sandbox.Limits())
    assert marked or not [note for note in found["notes"] if "it names" in note]
    told = iter(found["exercises"])
    for exercise in exercises(lesson):
        own = [next(told) for _ in exercise.titles]
        yield exercise, [(e["name"], e["status"], e["words"]) for e in own]


def test_live_ranks_of_an_answer_that_wait_for_each_other_are_named(tmp_path):
    (lesson,) = lessons_named(NOTEBOOKS, ["00"])
    locked = lambda e: next(
        (w.text for w in e.wrong if "wait for each other" in words_of(w)), e.cell.solved()
    )
    found = [verdict for _, verdicts in through_the_grader(lesson, locked, tmp_path) for verdict in verdicts]
    assert sorted(status for _, status, _ in found) == ["FAIL", "PASS", "PASS", "PASS"]
    (words,) = (said for _, status, said in found if status == "FAIL")
    assert "The ranks wait in a circle: 0 -> " in words


@pytest.mark.parametrize("name", LESSONS)
@pytest.mark.timeout(1200)
def test_solutions_pass_and_blanks_are_todo_through_the_grader_too(name, tmp_path):
    (lesson,) = lessons_named(NOTEBOOKS, [name])
    for exercise, found in through_the_grader(lesson, lambda e: e.cell.solved(), tmp_path, marked=False):
        assert as_expected(found, "PASS"), (exercise.cell.text[:60], found)
    for _, found in through_the_grader(lesson, lambda e: e.cell.blank(), tmp_path):
        assert {status for _, status, _ in found} == {"TODO"}


@pytest.mark.parametrize("name", LESSONS)
@pytest.mark.timeout(1200)
def test_wrong_answers_fail_with_their_words_through_the_grader_too(name):
    """As if each were of another student, but in one process, which starts only once.

    Before a wrong answer stands the solution, because some define only one of the functions of an exercise.
    """
    (lesson,) = lessons_named(NOTEBOOKS, [name])
    wrong, parts = [w for e in exercises(lesson) for w in e.wrong], {}
    for at, exercise in enumerate(exercises(lesson)):
        for one in exercise.wrong:
            text = f"{split(exercise.cell.solved())[0]}\n\n{one.text}"
            cells = cells_of(lesson, lambda e: text if e == exercise else e.cell.blank()).cells  # noqa: B023
            parts[len(parts)] = answers([c for c in cells if c.cell_type == "code"], lesson)[at]
    found = grading._tried(parts, lesson, sandbox.Limits(), ())
    told = [(one, found[i]) for i, one in enumerate(wrong)]
    assert told and not [(one.text, said) for one, said in told if not as_expected(said[0], words_of(one))]
