"""Grade a folder of notebooks: definitions come from students, everything else from the lesson's source.

Answers of one student are tried in one process, and one by one when that process does not reach its end, so that one
answer never decides about another.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ..lessons.answers import exercises, setup
from ..lessons.desk import split
from ..lessons.source import Lesson
from ..machine.checksum import sources
from . import submission
from .sandbox import Limits, run_judge


def submissions(folder: Path, lesson: Lesson) -> dict[str, Path]:
    """The notebooks under a folder by student: where they lie, less the lesson's own name.

    `ann.ipynb`, `ann/07_pipeline.ipynb` and `ann/07_pipeline_ann.ipynb` are ann's; where two would have one name, each
    is called by its path.
    """
    files = [
        Path(place, name)
        for place, _, names in sorted(os.walk(folder))
        for name in sorted(names)
        if name.endswith(".ipynb") and ".ipynb_checkpoints" not in place
    ]
    called = [_student(file.relative_to(folder), lesson) for file in files]
    return {
        name if called.count(name) == 1 else file.relative_to(folder).as_posix(): file
        for name, file in zip(called, files, strict=True)
    }


def _student(path: Path, lesson: Lesson) -> str:
    if len(path.parts) > 1 and path.stem.startswith(lesson.name):
        return path.parent.as_posix()
    return path.with_suffix("").as_posix()


def graded(path: Path, lesson: Lesson, limits: Limits, hide=()) -> dict:
    """The verdicts on one notebook: `notes`, `error`, and `exercises`, each with name, status, words and seconds."""
    names = [title for part in submission.answers([], lesson) for title in part.titles]
    try:
        cells, notes = submission.read_notebook(path, lesson)
        parts = submission.answers(cells, lesson)
    except (submission.Unreadable, OSError) as error:
        lost = [{"name": name, "status": "NONE", "words": "not read", "seconds": 0.0} for name in names]
        return {"notes": [], "error": str(error), "exercises": lost}
    for part, exercise in zip(parts, exercises(lesson), strict=True):
        named = named_beyond_the_solution(part.text, exercise) if part.text else []
        notes += [f"{part.titles[0]}: look at this answer, it names {name}" for name in named]
    found = _tried({i: part for i, part in enumerate(parts) if part.text is not None}, lesson, limits, hide)
    told = []
    for i, part in enumerate(parts):
        verdicts, seconds = found.get(i, ([], 0.0))
        said = {name: (status, words) for name, status, words in verdicts}
        for title in part.titles:
            lost = (
                (part.status, part.words) if part.text is None else ("FAIL", "your code ended its own check")
            )
            status, words = said.get(title, lost)
            told.append({"name": title, "status": status, "words": words, "seconds": seconds})
            if words.startswith("no end"):
                more = f"--seconds {3 * limits.seconds:g}"
                notes.append(f"{title}: look at this answer, it did not end; on a busy machine try {more}")
    return {"notes": notes, "error": "", "exercises": told}


def named_beyond_the_solution(text: str, exercise) -> list[str]:
    """What an answer names although it could reach the grader with it, and the exercise's solution does without."""
    ours = submission.touches(split(exercise.cell.solved())[0])
    return [name for name in submission.touches(text) if name not in ours]


def _tried(parts: dict, lesson: Lesson, limits: Limits, hide) -> dict[int, tuple[list, float]]:
    """Verdicts and seconds of the answers that were tried."""
    found, broke = _together(parts, lesson, limits, hide)
    for i in parts:
        alone = {}
        if i not in found and not (i in broke and broke[i].startswith("no end")):
            alone, again = _together({i: parts[i]}, lesson, limits, hide)
            broke |= again
        found |= alone
        if i not in found:
            found[i] = [(title, "FAIL", broke[i]) for title in parts[i].titles], limits.seconds
    return found


def _together(parts: dict, lesson: Lesson, limits: Limits, hide) -> tuple[dict, dict]:
    """What one process finds of these answers, and the one at which it broke off, with why."""
    tried = [(i, (part.before, part.text, part.checks)) for i, part in parts.items()]
    job = {"lesson": lesson.name, "setup": setup(lesson), "answers": tried}
    found, broke, at = {}, {}, None
    for step in run_judge(job, limits, hide) if tried else ():
        if "begin" in step:
            at = step["begin"]
        elif "end" in step:
            found[step["end"]] = step["verdicts"], step["seconds"]
        elif at is None:
            raise ValueError(
                f"{lesson.name} cannot be set up within {limits.gib:g} GiB and {limits.processes} processes: "
                f"{step['broke']}. Raise --memory, or run its notebook to see what is missing."
            )
        elif at not in found:
            broke[at] = step["broke"]
    return found, broke


def grade(
    files: dict[str, Path], lesson: Lesson, limits: Limits, jobs: int, known=(), hide=()
) -> Iterator[dict]:
    """The results of these students, as they are ready; those in `known` that still hold are not made again."""
    made = json.dumps(
        [sources(), lesson.digest, vars(limits)]
    ).encode()  # what a verdict follows from besides
    old = {(r["student"], r["key"]): r for r in known}
    with ThreadPoolExecutor(jobs) as pool:
        waiting = []
        for student, file in files.items():
            key = hashlib.sha256(made + _bytes(file)).hexdigest()[:16]
            if (student, key) in old:
                yield old[student, key]
                continue
            head = {"student": student, "file": str(file), "key": key}
            waiting.append(pool.submit(lambda f, h: h | graded(f, lesson, limits, hide), file, head))
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _bytes(file: Path) -> bytes:
    info = file.lstat()
    if file.is_symlink() or info.st_size > submission.LARGEST:
        return f"{info.st_size} {info.st_mtime_ns}".encode()
    return file.read_bytes()
