"""Results of a class as files: a table (CSV), everything (JSON), and a page of text for each student.

What students wrote stands there as plain text: it moves no cursor, adds no line of its own, and is no formula.
"""

import csv
import hashlib
import io
import json
import os
import re
from pathlib import Path

from ..corpus.storage import read_json, replacing

COLUMNS = "student", "passed", "of"
ELSEWHERE = "Use another --out, or move it away."
NOT_OURS = f"is no result of a grading. {ELSEWHERE}"


def plain(text: str) -> str:
    """The text in one line, with what a terminal or a file cannot show (control characters, no UTF-8) as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def passed(result: dict) -> int:
    """How many exercises pass."""
    return sum(e["status"] == "PASS" for e in result["exercises"])


def out_of_reach(results: list[dict]) -> str:
    """A sentence on the exercises whose checkers had to run beside the answer, which could forge these verdicts."""
    names = dict.fromkeys(e["name"] for r in results for e in r["exercises"] if not e["apart"])
    if not names:
        return "Every verdict was made out of reach of the answer that it is about."
    return (
        f"{', '.join(names)}: the checker had to run beside the answer, which could forge this verdict. The others "
        "were made out of reach of the answer that they are about."
    )


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
        lines += [f"      {line}" for line in e["words"].splitlines()]
    notes = [f"Remark: {note}" for note in result["notes"] if ": look at" not in note]
    return "\n".join([*lines, "", *notes, remark]) + "\n"


def write_results(results: list[dict], lesson: str, out: Path, remark: str) -> None:
    """Write `out` (CSV), the same in JSON beside it, and a folder of that name with a page for each student."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    names = [e["name"] for e in results[0]["exercises"]]
    table.writerow([*COLUMNS, *names, "error", "notes", "file"])
    for r in results:
        status = [e["status"] for e in r["exercises"]]
        more = r["error"], "; ".join(r["notes"]), r["file"]
        row = [r["student"], passed(r), len(status), *status, *more]
        table.writerow([f"'{v}" if str(v).startswith(("=", "+", "-", "@")) else v for v in row])
    everything = json.dumps({"lesson": lesson, "results": results}, indent=1)
    for file, said in ((out, text.getvalue()), (out.with_suffix(".json"), everything)):
        with replacing(file) as new:
            new.write(said.encode())
    out.with_suffix("").mkdir(exist_ok=True)
    for r in results:
        page = student_page(r, lesson, f"{remark} {out_of_reach([r])}")
        (out.with_suffix("") / f"{_slug(r['student'])}.txt").write_text(page, encoding="utf-8")


def known_results(out: Path, lesson: str) -> list[dict]:
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
    for one in (out, file):
        if one.exists() and not one.is_file():
            raise ValueError(f"{one} is no regular file. {ELSEWHERE}")
    begin = ",".join(COLUMNS).encode() + b","
    if out.exists() and not out.read_bytes().startswith(begin):
        raise ValueError(f"{out} {NOT_OURS}")
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
