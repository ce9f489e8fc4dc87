"""Run what students handed in, and write their results: grades.csv, grades.json, and a page of text for each student.

gpt2lab grade 07 submissions/ --out grades.csv
gpt2lab grade 07 submissions/ --csv canvas     and grades.canvas.csv, which Canvas imports (or --csv moodle)

FOLDER holds a notebook for each student: ann.ipynb, ann/07_pipeline.ipynb, or what Canvas or Moodle gave as a download.
Only what students wrote for exercises is run, with the lesson's own checks; what their notebooks show does not count.
A second call goes on where the first one ended and grades only what is new. It writes all these files anew:
correct grades in a copy.
"""

import signal
import sys
import threading
from pathlib import Path

from ..classroom import NOTEBOOKS, lessons_named, report, sandbox
from ..classroom.grade import grade, others, submissions
from ..machine.options import Setting, positive, within

OPTIONS = {
    "lesson": Setting("how its name begins, such as 07", placed=True),
    "folder": Setting("where the notebooks are", Path, placed=True),
    "out": Setting("the table", Path, Path("grades.csv")),
    "csv": Setting(
        "also the table that this system imports, as OUT.canvas.csv", choices=[*report.GRADEBOOKS]
    ),
    "jobs": Setting("students at a time", positive, 2),
    "seconds": Setting("for one exercise", within(0.1), sandbox.Limits().seconds),
    "memory": Setting("GiB for one student", within(0.001), sandbox.Limits().gib),
    "again": Setting("grade also what has been graded", bool),
    "notebooks": Setting("where the lessons are", Path, NOTEBOOKS),
}


def run(args) -> None:
    """Grade, and write after each student; SIGTERM ends it as Ctrl-C does, with nothing left behind."""
    if threading.current_thread() is not threading.main_thread():
        return _run(args)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _run(args)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(args) -> None:
    from tqdm import tqdm

    (lesson, *more) = lessons_named(args.notebooks, [args.lesson])
    if more:
        raise ValueError(f"{args.lesson!r} fits {lesson.name} and {more[0].name}. Name one lesson.")
    files = submissions(args.folder, lesson)
    if not files:
        raise ValueError(f"There are no notebooks (*.ipynb) in {args.folder}.")
    known = report.known_results(args.out, lesson.name, args.csv)
    known = [] if args.again else known
    limits, remark = sandbox.Limits(args.seconds, args.memory), sandbox.sentence()
    print(remark)
    if left := others(args.folder, args.out):
        more = f" and {len(left) - 3} more" * (len(left) > 3)
        print(f"Not graded, as their names do not end in .ipynb: {', '.join(left[:3])}{more}.")
    done, hide = {}, [args.folder, args.notebooks, args.out.resolve().parent]
    students = grade(files, lesson, limits, args.jobs, known, hide)
    for result in tqdm(students, total=len(files), unit="student"):
        done[result["student"]] = result
        left = [r for r in known if r["student"] not in done]
        report.write_results([*done.values(), *left], lesson.name, args.out, remark, args.csv)
    results = [done[student] for student in files]
    report.write_results(results, lesson.name, args.out, remark, args.csv)
    everything = sum(report.passed(r) == len(r["exercises"]) for r in results)
    looks = sum(bool(r["notes"] or r["error"]) for r in results)
    print(f"{len(results)} students, {everything} with every exercise passed, {looks} to look at: {args.out}")
