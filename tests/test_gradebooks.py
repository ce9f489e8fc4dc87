"""A teacher gets more than verdicts: tables that Canvas and Moodle import, functions renamed."""

import csv
import json

import pytest
import submissions

from gpt2lab import cli
from gpt2lab.classroom import report
from gpt2lab.classroom.submission import read_answers

VERDICTS = {"ann": ("PASS", "PASS"), "bo@example.org": ("FAIL", "PASS"), "=1+1": ("TODO", "NONE")}


def results():
    exercise = {"words": "", "seconds": 0.0, "apart": True}
    head = {"file": "", "key": "", "error": "", "notes": []}
    return [
        {"student": student} | head | {"exercises": [{"name": n, "status": s} | exercise for n, s in told]}
        for student, told in (
            (who, zip(("half", "third"), said, strict=True)) for who, said in VERDICTS.items()
        )
    ]


TABLES = {
    "canvas": [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "07_halves"],
        ["    Points Possible", "", "", "", "", "2"],
        ["ann", "", "", "ann", "", "2"],
        ["bo@example.org", "", "", "bo@example.org", "", "1"],
        ["'=1+1", "", "", "'=1+1", "", "0"],
    ],
    "moodle": [
        ["First name", "Surname", "ID number", "Institution", "Department", "Email address"]
        + ["Assignment: 07_halves", "Feedback: 07_halves"],
        ["", "", "ann", "", "", "", "2", "half: PASS; third: PASS"],
        ["", "", "", "", "", "bo@example.org", "1", "half: FAIL; third: PASS"],
        ["", "", "'=1+1", "", "", "", "0", "half: TODO; third: NONE"],
    ],
}


@pytest.mark.parametrize("system", report.GRADEBOOKS)
def test_a_table_has_the_columns_that_the_system_imports(system, tmp_path):
    out, table = tmp_path / "g.csv", tmp_path / f"g.{system}.csv"
    report.write_results(results(), "07_halves", out, "", system)
    assert list(csv.reader(table.read_text().splitlines())) == TABLES[system]
    assert report.known_results(out, "07_halves", system) == results()
    table.write_text("name,mark\nann,1\n")
    with pytest.raises(ValueError, match=f"g.{system}.csv is no result of a grading"):
        report.known_results(out, "07_halves", system)


DOWNLOADED = {
    "canvas": (
        [
            "in/annalee_12_345_07_halves.ipynb",
            "in/bo_LATE_9_346_07_halves-1.ipynb",
            "in/team_3_07_halves.ipynb",
        ],
        [["ann", "12", "", "", "", "2"], ["bo@example.org", "9", "", "", "", "1"]]
        + [["'=1+1", "", "", "'=1+1", "", "0"]],
    ),
    "moodle": (
        ["in/Ann Lee_12_assignsubmission_file_/07_halves.ipynb", "Bo_9_assignsubmission_file_07_halves.ipynb"]
        + ["a/Cy_3_assignsubmission_file/my work.ipynb"],
        [["Participant 12", "ann", "2", "", "half: PASS; third: PASS"]]
        + [["Participant 9", "bo@example.org", "1", "", "half: FAIL; third: PASS"]]
        + [["Participant 3", "'=1+1", "0", "", "half: TODO; third: NONE"]],
    ),
}


@pytest.mark.parametrize("system", DOWNLOADED)
def test_files_that_were_downloaded_there_say_whose_they_are(system, tmp_path):
    files, rows = DOWNLOADED[system]
    named = [r | {"file": file} for r, file in zip(results(), files, strict=True)]
    out, table = tmp_path / "g.csv", tmp_path / f"g.{system}.csv"
    report.write_results(named, "07_halves", out, "", system)
    found = list(csv.reader(table.read_text().splitlines()))
    heads = {"canvas": TABLES["canvas"][:2], "moodle": [list(report.WORKSHEET)]}[system]
    assert found == heads + rows
    assert report.known_results(out, "07_halves", system) == named
    other = {"canvas": "moodle", "moodle": "canvas"}[system]  # whose numbers mean nothing there
    assert report.gradebook(other, named, "07_halves") == report.gradebook(other, results(), "07_halves")


def test_of_two_notebooks_of_one_student_the_better_one_counts():
    same = [r | {"file": f"ann_12_{i}_07_halves.ipynb"} for i, r in enumerate(results())]
    for order in (same, same[::-1]):
        assert report.gradebook("canvas", order, "07_halves")[2:] == [["ann", "12", "", "", "", 2]]
    other = results()[1] | {"student": "12", "file": "12.ipynb"}
    assert report.gradebook("canvas", [*same, other], "07_halves")[3:] == [["12", "", "", "12", "", 1]]


@pytest.mark.parametrize("scheme", ["2026_1{i}_29_{who}", "hw_11_29_{who}", "{who}_11_2{i}_final"])
def test_numbers_in_names_that_students_give_are_not_taken_for_those_of_canvas(scheme):
    """A class whose files began with a date was one student, of the number 11."""
    files = [f"{scheme.format(i=i, who=r['student'])}.ipynb" for i, r in enumerate(results())]
    named = [r | {"file": file} for r, file in zip(results(), files, strict=True)]
    assert report.gradebook("canvas", named, "07_halves") == report.gradebook(
        "canvas", results(), "07_halves"
    )


@pytest.mark.parametrize("name", ["g.csv", "g.canvas.csv"])
def test_a_worksheet_that_was_downloaded_is_not_written_over(name, tmp_path):
    (tmp_path / name).write_text(f"{','.join(report.WORKSHEET)}\nParticipant 3,Ann,,,\n")
    with pytest.raises(ValueError, match=f"{name} is no result of a grading"):
        report.known_results(tmp_path / "g.csv", "07_halves", "canvas")


def test_without_a_system_there_is_no_such_table_and_another_one_is_refused(tmp_path, capsys):
    report.write_results(results(), "07_halves", tmp_path / "g.csv", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g", "g.csv", "g.json"]
    with pytest.raises(SystemExit):
        cli.main(["grade", "07", str(tmp_path), "--csv", "moodel"])
    assert "canvas" in (said := capsys.readouterr().err) and "moodle" in said


def read(lesson, change):
    """What is said of each exercise of a student's notebook after `change(its first exercise's text)`."""
    notebook = json.loads(json.dumps(lesson.notebook(student=False)))
    cell = next(c for c in notebook["cells"] if "def half" in c["source"])
    cell["source"] = change(cell["source"])
    half, third = read_answers(json.dumps(notebook).encode(), lesson)[0]
    assert third.text and not third.words
    return half.status, half.words


@pytest.mark.parametrize(
    "name, status, words",
    [
        ("halve", "FAIL", "`halve` looks like `half`: give it that name"),
        ("Half", "FAIL", "`Half` looks like `half`: give it that name"),
        ("divide", "TODO", ""),
    ],
)
def test_a_function_with_another_name_is_told(name, status, words, tmp_path):
    lesson = submissions.lesson(tmp_path)
    rename = lambda text: text.replace("half(x)", f"{name}(x)").replace(", half)", f", {name})")
    assert read(lesson, rename) == (status, words)
    assert read(lesson, lambda text: text) == ("TODO", "")  # nothing to tell: it is tried


def test_a_helper_is_not_taken_for_a_function_that_is_there(tmp_path):
    lesson = submissions.lesson(tmp_path)
    beside = lambda text: "def halves(x):\n    return [x / 2]\n\n\n" + text
    assert read(lesson, beside) == ("TODO", "")
