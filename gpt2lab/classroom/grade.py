"""Grade a folder of notebooks: definitions come from students, everything else from the lesson's source.

Answers of one student are tried in one sandbox, each in processes of its own; where an answer ends the sandbox, the
others go on in a new one, so that one answer never decides about another.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ..lessons.answers import setup
from ..lessons.source import Lesson
from ..machine.checksum import sources
from . import submission
from .reading import read_apart
from .report import downloaded, plain
from .sandbox import NEVER, Limits, Stopped, run_judge

LOST = "FAIL", "your code ended its own check"


def submissions(folder: Path, lesson: Lesson) -> dict[str, Path]:
    """The notebooks under a folder by student: where they lie, less the lesson's name and what Canvas or Moodle adds.

    `ann.ipynb`, `ann/07_pipeline.ipynb`, `ann/07_pipeline_ann.ipynb`, Canvas's `ann_12_345_07_pipeline.ipynb` and
    Moodle's `ann_12_assignsubmission_file/07_pipeline.ipynb` are ann's. Where two have one name, each gets its path.
    """
    files = [
        Path(place, name)
        for place, _, names in sorted(os.walk(folder))
        for name in sorted(names)
        if _is_notebook(name) and ".ipynb_checkpoints" not in place
    ]
    called = [_student(file.relative_to(folder), lesson) for file in files]
    found: dict[str, Path] = {}
    for name, file in zip(called, files, strict=True):
        name = plain(name if called.count(name) == 1 else file.relative_to(folder).as_posix())
        while name in found:  # another name that is written in the same way
            name += "+"
        found[name] = file
    return found


def _is_notebook(name: str) -> bool:
    return name.lower().endswith(".ipynb")


def others(folder: Path, out: Path) -> list[str]:
    """The files under a folder that are no notebooks by their names, besides hidden ones and the results in `out`."""
    found, ours = [], out.resolve().with_suffix("")
    for file in sorted(folder.rglob("*")):
        place = file.resolve()
        made = ours in place.parents or place.parent == ours.parent and place.name.startswith(f"{ours.name}.")
        inside = file.relative_to(folder)
        hidden = any(part.startswith(".") for part in inside.parts)
        if file.is_file() and not (_is_notebook(file.name) or hidden or made):
            found.append(plain(str(inside)))
    return found


def _student(path: Path, lesson: Lesson) -> str:
    if found := downloaded(path.as_posix(), lesson.name):
        return found.string[: found.end(1)]
    within = len(path.parts) > 1 and path.stem.startswith(lesson.name)
    return (path.parent if within else path.with_suffix("")).as_posix()


def graded(path: Path, lesson: Lesson, limits: Limits, hide=(), stop: threading.Event = NEVER) -> dict:
    """The verdicts on one notebook: `notes`, `error`, and `exercises`, each with name, status, words and seconds.

    Whatever one student hands in becomes a sentence in `error`, so that it does not end the grading of the others.
    """
    try:
        parts, notes = read_apart(path, lesson, stop)
        found = _tried({i: p for i, p in enumerate(parts) if p.text is not None}, lesson, limits, hide, stop)
    except (Stopped, NoSetup):
        raise
    except Exception as error:
        said = str(error) if isinstance(error, submission.Unreadable) else f"{type(error).__name__}: {error}"
        names = [title for part in submission.answers([], lesson) for title in part.titles]
        nothing = {"status": "NONE", "words": "not read", "seconds": 0.0, "apart": True}
        lost = [{"name": name} | nothing for name in names]
        return {"notes": [], "error": plain(said), "exercises": lost}
    notes, told = [plain(note) for note in notes], []
    for i, part in enumerate(parts):
        verdicts, seconds, apart = found.get(i, ([], 0.0, True))
        said = {name: (status, words) for name, status, words in verdicts}
        for title in part.titles:
            status, words = said.get(title, LOST if part.text is not None else (part.status, part.words))
            shown = "\n".join(map(plain, words.split("\n")))
            told.append({"name": title, "status": status, "words": shown, "seconds": seconds, "apart": apart})
            if words.startswith("no end"):
                more = f"--seconds {3 * limits.seconds:g}"
                notes.append(f"{title}: look at this answer, it did not end; on a busy machine try {more}")
    return {"notes": notes, "error": "", "exercises": told}


class NoSetup(ValueError):
    """The lesson's own cells do not run within the limits, so no answer can be tried."""


def _tried(
    parts: dict, lesson: Lesson, limits: Limits, hide=(), stop=NEVER
) -> dict[int, tuple[list, float, bool]]:
    """Verdicts and seconds of the answers that were tried, and whether each could not reach its own verdict."""
    found, left = {}, dict(parts)
    while left:
        ended, broke = _together(left, lesson, limits, hide, stop)
        found |= ended
        for i, words in broke.items():  # at most one; it is tried once more, without the others
            if len(left) > 1 and not words.startswith("no end"):
                alone, again = _together({i: parts[i]}, lesson, limits, hide, stop)
                found |= alone
                words = again.get(i, words)
            found.setdefault(i, ([(title, "FAIL", words) for title in parts[i].titles], limits.seconds, True))
        left = {i: part for i, part in left.items() if i not in found}
    return found


def _together(parts: dict, lesson: Lesson, limits: Limits, hide, stop) -> tuple[dict, dict]:
    """What one process finds of these answers, and the one at which it broke off, with why."""
    tried = [(i, (part.before, part.text, part.checks)) for i, part in parts.items()]
    job = {"lesson": lesson.name, "setup": setup(lesson), "answers": tried}
    found, broke, at = {}, {}, None
    for step in run_judge(job, limits, hide, stop) if tried else ():
        if "begin" in step:
            at = step["begin"]
        elif "end" in step:
            found[step["end"]] = step["verdicts"], step["seconds"], step["apart"]
        elif at is None:
            raise NoSetup(
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
    made = json.dumps([sources(), lesson.digest, vars(limits)]).encode()  # what else a verdict follows from
    old = {(r["student"], r["key"]): r for r in known}
    stop = threading.Event()
    with ThreadPoolExecutor(jobs) as pool:
        waiting = []
        try:
            for student, file in files.items():
                key = hashlib.sha256(made + _bytes(file)).hexdigest()[:16]
                head = {"student": student, "file": plain(str(file)), "key": key}
                if (student, key) in old:
                    yield old[student, key] | head
                    continue
                one = lambda f, h: h | graded(f, lesson, limits, hide, stop)
                waiting.append(pool.submit(one, file, head))
            for done in as_completed(waiting):
                yield done.result()
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _bytes(file: Path) -> bytes:
    try:
        return submission.notebook_bytes(file)
    except submission.Unreadable as error:
        return str(error).encode()
