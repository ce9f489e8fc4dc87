"""Results of a class as files: a table (CSV), everything (JSON), and a page of text for each student."""

import csv
import io
import json
import os
import re
from pathlib import Path


def passed(result: dict) -> int:
    """How many exercises pass."""
    return sum(e["status"] == "PASS" for e in result["exercises"])


def student_page(result: dict, lesson: str, remark: str) -> str:
    """What a student gets: verdict, words and seconds of every exercise."""
    lines = [
        f"{lesson}: {result['student']}",
        f"{passed(result)} of {len(result['exercises'])} exercises pass.",
        "",
    ]
    lines += [result["error"]] if result["error"] else []
    for e in result["exercises"]:
        lines.append(f"{e['status']:4}  {e['name']}  ({e['seconds']:.1f} s)")
        lines += [f"      {e['words']}"] if e["words"] else []
    notes = [f"Remark: {note}" for note in result["notes"] if ": look at" not in note]
    return "\n".join([*lines, "", *notes, remark]) + "\n"


def write_results(results: list[dict], lesson: str, out: Path, remark: str) -> None:
    """Write `out` (CSV), the same in JSON beside it, and a folder of that name with a page for each student."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    names = [e["name"] for e in results[0]["exercises"]]
    table.writerow(["student", "passed", "of", *names, "error", "notes", "file"])
    for r in results:
        status = [e["status"] for e in r["exercises"]]
        more = r["error"], "; ".join(r["notes"]), r["file"]
        table.writerow([r["student"], passed(r), len(status), *status, *more])
    _replace(out, text.getvalue())
    _replace(out.with_suffix(".json"), json.dumps({"lesson": lesson, "results": results}, indent=1))
    out.with_suffix("").mkdir(exist_ok=True)
    for r in results:
        (out.with_suffix("") / f"{_slug(r['student'])}.txt").write_text(student_page(r, lesson, remark))


def _replace(file: Path, text: str) -> None:
    """Write a file that is complete or as before."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, newline="")
    os.replace(partial, file)


def known_results(out: Path, lesson: str) -> list[dict]:
    """The results that an earlier call has written for the same lesson; none where there is no such file.

    Raises ValueError for another file, which would be overwritten.
    """
    file = out.with_suffix(".json")
    try:
        found = json.loads(file.read_bytes()) if file.exists() else {"lesson": ""}
        return found["results"] if found["lesson"] == lesson else []
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is no result of a grading. Use another --out, or delete it.") from None


def _slug(student: str) -> str:
    """A name for a file: other names give other files."""
    return re.sub(r"[^\w.-]", lambda m: f"+{ord(m[0]):x}", student)
