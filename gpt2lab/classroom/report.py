"""Results of a class as files: a table (CSV), everything (JSON), and a page of text for each student."""

import csv
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
    save_results(results, lesson, out)
    names = [e["name"] for e in results[0]["exercises"]] if results else []
    partial = out.with_name(out.name + ".partial")
    with partial.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["student", "passed", "of", *names, "error", "notes", "file"])
        for r in results:
            status = [e["status"] for e in r["exercises"]]
            table.writerow(
                [r["student"], passed(r), len(status), *status, r["error"], "; ".join(r["notes"]), r["file"]]
            )
    os.replace(partial, out)
    pages = out.with_suffix("")
    pages.mkdir(exist_ok=True)
    for r in results:
        (pages / f"{_slug(r['student'])}.txt").write_text(student_page(r, lesson, remark))


def save_results(results: list[dict], lesson: str, out: Path) -> None:
    """Write the JSON beside `out`, so that it is complete or as before."""
    partial = out.with_name(out.name + ".partial")
    partial.write_text(json.dumps({"lesson": lesson, "results": results}, indent=1))
    os.replace(partial, out.with_suffix(".json"))


def known_results(out: Path, lesson: str) -> list[dict]:
    """The results that an earlier call has written for the same lesson; none where there is no such file."""
    try:
        found = json.loads(out.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return []
    return found["results"] if found.get("lesson") == lesson else []


def _slug(student: str) -> str:
    """A name for a file: other names give other files."""
    return re.sub(r"[^\w.-]", lambda m: f"+{ord(m[0]):x}", student)
