"""Reading a notebook in a process of its own, within limits of time and memory: `python -m gpt2lab.classroom.reading`.

It gets a lesson and the bytes of a notebook (pickled) and writes what `submission.read_answers` says, as JSON.
"""

import json
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ..lessons.source import Lesson
from ..processes.orphans import die_with_parent
from . import submission
from .judge import limit
from .sandbox import HOME, NEVER, SETUP, Stopped

PROGRAM = ["-m", __name__]
SECONDS, GIB = 20, 2.0
"""Processor time and memory that reading a notebook may take."""


def read_apart(path: Path, lesson: Lesson, stop: threading.Event = NEVER):
    """What `submission.read_answers` says of this file; raises Unreadable, and Stopped when `stop` is set."""
    with tempfile.TemporaryFile() as given:
        pickle.dump((lesson, submission.notebook_bytes(path)), given)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", *PROGRAM],
            env={"PYTHONPATH": str(HOME)},
            cwd="/",
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    last, said = time.monotonic() + SETUP, None
    while said is None:
        try:
            said = process.communicate(timeout=0.1)[0]
        except subprocess.TimeoutExpired:
            if stop.is_set() or time.monotonic() > last:
                process.kill()
    if stop.is_set():
        raise Stopped
    if process.returncode:
        raise submission.Unreadable(
            f"The notebook cannot be read within {SECONDS} s and {GIB:g} GiB. Does it hold more than answers?"
        )
    found = json.loads(said)
    if "error" in found:
        raise submission.Unreadable(found["error"])
    return [submission.Answer(**part) for part in found["parts"]], found["notes"]


def main() -> None:
    """Read the notebook that comes through standard input."""
    die_with_parent(signal.SIGKILL)
    lesson, data = pickle.load(sys.stdin.buffer)
    limit(GIB)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    try:
        parts, notes = submission.read_answers(data, lesson)
        found = {"parts": [vars(part) for part in parts], "notes": notes}
    except submission.Unreadable as error:
        found = {"error": str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
