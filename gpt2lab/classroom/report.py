"""Results of a class as files: a table (CSV), everything (JSON), and a page of text for each student."""

import csv
import io
import json
import re
from pathlib import Path

from ..corpus.storage import read_json, replacing


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
    everything = json.dumps({"lesson": lesson, "results": results}, indent=1)
    for file, said in ((out, text.getvalue()), (out.with_suffix(".json"), everything)):
        with replacing(file) as new:
            new.write(said.encode())
    out.with_suffix("").mkdir(exist_ok=True)
    for r in results:
        (out.with_suffix("") / f"{_slug(r['student'])}.txt").write_text(student_page(r, lesson, remark))


def known_results(out: Path, lesson: str) -> list[dict]:
    """The results that an earlier call has written for the same lesson; none where there is no such file.

    Raises ValueError for another file, which would be overwritten.
    """
    file = out.with_suffix(".json")
    results = lambda found: found["results"] if found["lesson"] == lesson else []
    another = "is no result of a grading. Use another --out, or delete it."
    return read_json(file, results, another) if file.exists() else []


def _slug(student: str) -> str:
    """A name for a file: other names give other files."""
    return re.sub(r"[^\w.-]", lambda m: f"+{ord(m[0]):x}", student)
