"""Results of a class as files: a table (CSV), everything (JSON), and a page of text for each student.

What students wrote stands there as plain text: it moves no cursor, adds no line of its own, and is no formula.
"""

import csv
import hashlib
import io
import json
import os
import re
from collections import defaultdict
from pathlib import Path

from ..corpus.storage import read_json, replacing

COLUMNS = "student", "passed", "of"
GRADEBOOKS = {
    "canvas": ("Student", "ID", "SIS User ID", "SIS Login ID", "Section"),
    "moodle": ("First name", "Surname", "ID number", "Institution", "Department", "Email address"),
}
"""The columns before the grades of what each system exports and imports, in its own order."""
WORKSHEET = "Identifier", "Full name", "Grade", "Last modified (grade)", "Feedback comments"
"""Those of Moodle's grading worksheet of one assignment. Sources: lib/gradebook_importer.rb of instructure/canvas-lms;
grade/import/csv and mod/assign/feedback/offline of moodle/moodle, with tests; docs.moodle.org/en/Grade_import."""
ELSEWHERE = "Use another --out, or move it away."
NOT_OURS = f"is no result of a grading. {ELSEWHERE}"


def plain(text: str) -> str:
    """The text in one line, with what a terminal or a file cannot show (control characters, no UTF-8) as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def passed(result: dict) -> int:
    """How many exercises pass."""
    return sum(e["status"] == "PASS" for e in result["exercises"])


def out_of_reach(result: dict) -> str:
    """A sentence on the exercises whose checkers had to run beside the answer, which could forge these verdicts."""
    names = [e["name"] for e in result["exercises"] if not e["apart"]]
    if not names:
        return "Every verdict was made out of reach of the answer that it is about."
    return (
        f"{', '.join(names)}: the checker had to run beside the answer, which could forge this verdict. The others "
        "were made out of reach of the answer that they are about."
    )


def student_page(result: dict, lesson: str, remark: str) -> str:
    """What a student gets: verdict, words and seconds of every exercise, or why the file could not be read."""
    head = f"{lesson}: {result['student']}"
    if result["error"]:
        return f"{head}\nNothing could be graded. {result['error']}\n"
    lines = [head, f"{passed(result)} of {len(result['exercises'])} exercises pass.", ""]
    for e in result["exercises"]:
        lines.append(f"{e['status']:4}  {e['name']}  ({e['seconds']:.1f} s)")
        lines += [f"      {line}" for line in e["words"].splitlines()]
    notes = [f"Remark: {note}" for note in result["notes"] if ": look at" not in note]
    return "\n".join([*lines, "", *notes, f"{remark} {out_of_reach(result)}"]) + "\n"


def downloaded(path: str, lesson: str) -> re.Match | None:
    """What Canvas or Moodle says in the path of a file that was downloaded there: name, number of the user, the rest.

    Canvas's is `doeann_LATE_12_345_07_pipeline` (lib/content_zipper.rb); Moodle's `Ann Doe_12_assignsubmission_file`,
    of the file or of its folder, with the number of the participant (mod/assign/classes/downloader.php). The name has
    a letter: `2026_11_29_ann` begins with a date.
    """
    name, rest = r"[^/]*?[^\W\d_][^/]*?", rf"assignsubmission_file.*|(?!{lesson})\d+_[^/]+"
    return re.search(rf"({name})(?:_LATE)?_(\d+)_({rest})$", re.sub(r"(?i)\.ipynb$", "", path))


def _numbers(system: str, files: list[str], lesson: str) -> dict[str, str]:
    """File -> the number that a system has given its user, of those that were downloaded there.

    Files of one user have one name, and Canvas gives each of them a number of its own: where that does not hold, the
    files were named so by students, as `ann_11_29_final` and `bob_11_29_final`.
    """
    found, numbers = defaultdict(list), {}
    for file in files:
        said = downloaded(file, lesson)
        if said and said[3].startswith("assign") == (system == "moodle"):
            found[said[2]].append((file, said[1], said[3]))
    for number, group in found.items():
        theirs, names, rests = zip(*group, strict=True)
        own = rests if system == "moodle" else [rest.split("_")[0] for rest in rests]
        if len(set(names)) == 1 and len(set(own)) == len(set(rests)):
            numbers |= dict.fromkeys(theirs, number)
    return numbers


def gradebook(system: str, results: list[dict], lesson: str) -> list[list]:
    """The rows that a system of GRADEBOOKS imports: exercises that pass are points, of two notebooks the better ones.

    A student is known by the number that the system has given the file. Where there is none the name stands where the
    system looks for its own: for Canvas the login, else the name; for Moodle the ID number, or the address where it has
    an @. Moodle loses a grade that comes without its feedback.
    """
    columns, best = GRADEBOOKS[system], {}
    numbers = _numbers(system, [r["file"] for r in results], lesson)
    for r in results:
        number = numbers.get(r["file"], "")
        one, key = (r["student"], number, passed(r), r["exercises"]), (number, number or r["student"])
        best[key] = max(best.get(key, one), one, key=lambda one: one[2])
    if system == "canvas":
        rows = [[*columns, lesson], ["    Points Possible", "", "", "", "", len(results[0]["exercises"])]]
        return rows + [[who, number, "", "" if number else who, "", n] for who, number, n, _ in best.values()]
    worksheet = all(number for _, number, *_ in best.values())
    rows = [WORKSHEET if worksheet else [*columns, f"Assignment: {lesson}", f"Feedback: {lesson}"]]
    for who, number, n, exercises in best.values():
        told = "; ".join(f"{e['name']}: {e['status']}" for e in exercises)
        place = ["", "", "", who] if "@" in who else [who, "", "", ""]
        rows.append([f"Participant {number}", who, n, "", told] if worksheet else ["", "", *place, n, told])
    return rows


def _csv(rows: list[list]) -> str:
    """The rows as CSV, none of them a formula."""
    text = io.StringIO(newline="")
    formula = lambda value: str(value).startswith(("=", "+", "-", "@"))
    csv.writer(text).writerows([f"'{v}" if formula(v) else v for v in row] for row in rows)
    return text.getvalue()


def write_results(results: list[dict], lesson: str, out: Path, remark: str, system: str = "") -> None:
    """Write `out` (CSV), the same in JSON beside it, and a folder of that name with a page for each student.

    With a system of GRADEBOOKS also the table that it imports.
    """
    rows = [[*COLUMNS, *(e["name"] for e in results[0]["exercises"]), "error", "notes", "file"]]
    for r in results:
        status = [e["status"] for e in r["exercises"]]
        more = r["error"], "; ".join(r["notes"]), r["file"]
        rows.append([r["student"], passed(r), len(status), *status, *more])
    everything = json.dumps({"lesson": lesson, "results": results}, indent=1)
    files = {out: _csv(rows), out.with_suffix(".json"): everything}
    if system:
        files[out.with_suffix(f".{system}.csv")] = _csv(gradebook(system, results, lesson))
    for file, said in files.items():
        with replacing(file) as new:
            new.write(said.encode())
    out.with_suffix("").mkdir(exist_ok=True)
    for r in results:
        file = out.with_suffix("") / f"{_slug(r['student'])}.txt"
        file.write_text(student_page(r, lesson, remark), encoding="utf-8")


def known_results(out: Path, lesson: str, system: str = "") -> list[dict]:
    """The results that an earlier call has written for the same lesson; none where there are none.

    Raises ValueError, before anything is graded, where the results cannot be written or something else would be lost.
    """
    file, pages = out.with_suffix(".json"), out.with_suffix("")
    if out.suffix != ".csv":
        raise ValueError(f"{out} must be a table: give --out a name that ends in .csv.")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ValueError(
            f"The folder {out.parent} of --out is not there or cannot be written. Make it first."
        )
    begins = {out: [COLUMNS]}
    if system:
        begins[out.with_suffix(f".{system}.csv")] = [GRADEBOOKS[system], *[WORKSHEET] * (system == "moodle")]
    for one in (file, *begins):
        if one.exists() and not one.is_file():
            raise ValueError(f"{one} is no regular file. {ELSEWHERE}")
    for one, known in begins.items():
        heads = tuple(",".join(columns).encode() for columns in known)
        if one.exists() and not one.read_bytes().startswith(heads):
            raise ValueError(f"{one} {NOT_OURS}")
    if pages.exists() and not (pages.is_dir() and file.exists()):
        raise ValueError(f"{pages}, where the students' pages would be, is there already. {ELSEWHERE}")
    if not file.exists():
        return []
    of, results = read_json(
        file, lambda found: (found["lesson"], [_checked(r) for r in found["results"]]), NOT_OURS
    )
    if of != lesson:
        raise ValueError(f"{file} holds the results of {of}, not of {lesson}. {ELSEWHERE}")
    return results


def _checked(result: dict) -> dict:
    """A result as this module writes it; raises ValueError for anything else."""
    texts = [result[key] for key in ("student", "file", "key", "error")] + result["notes"]
    for e in result["exercises"]:
        texts += [e["name"], e["status"], e["words"]]
        if not isinstance(e["seconds"], int | float) or not isinstance(e.setdefault("apart", False), bool):
            raise ValueError
    if not all(isinstance(text, str) for text in texts):
        raise ValueError
    return result


def _slug(student: str) -> str:
    """A name for a file: other names give other files."""
    name = re.sub(r"[^\w.-]", lambda m: f"+{ord(m[0]):x}", student)
    if len(name.encode()) < 200:
        return name
    return f"{name[:40]}+{hashlib.sha256(student.encode()).hexdigest()[:16]}"
