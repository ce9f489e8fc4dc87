"""Checkers of the lessons' exercises, one module a lesson.

A checker is a function that takes a learner's answer and raises `AssertionError` with a sentence that helps;
it knows nothing of notebooks. `check` runs one and prints PASS, TODO or FAIL, so that Run All always reaches
the end.
"""

import json
import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from ...corpus.storage import replacing
from ..environment import static, unanswered
from .differences import close, returned
from .engine import Puzzle, Task, by_chance, called, refuse, run_there, scored, sentence, spoken
from .guards import by_hand, closed, frames_closed, guarded, restored, unaided

__all__ = [
    "KEPT",
    "LIMIT",
    "STATUS",
    "NotPassed",
    "Puzzle",
    "Task",
    "by_chance",
    "by_hand",
    "called",
    "check",
    "close",
    "closed",
    "live",
    "refuse",
    "returned",
    "run_there",
    "scored",
    "sentences",
    "unaided",
    "verdict",
    "without_frames",
]

LIMIT = 100.0
"""Seconds after which an answer is stopped, so that one that never ends does not stop Run All."""

STATUS: dict[str, str] = {}
"""The last verdict of every exercise checked in this process: PASS, TODO or FAIL."""


KEPT = ".gpt2lab-progress.json"
"""The file in a notebook's folder that keeps the last verdicts, for `gpt2lab progress`."""


class NotPassed(AssertionError):
    """Raised in strict mode by `check` when an exercise is not PASS."""


def check(name: str, test, *args, **kwargs) -> None:
    """Run `test(*args, **kwargs)` and say in one line: PASS, TODO (not written yet) or FAIL with the reason.

    What the test returns, such as a score (see `scored`), stands behind PASS.
    With GPT2LAB_STRICT=1 in the environment, as when solutions are built, anything but PASS raises NotPassed.
    """
    from ..display import show_verdict  # not where answers are graded: it brings what draws

    status, why = verdict(test, *args, **kwargs)
    STATUS[name] = status
    _keep(name, status)
    show_verdict(status, name, why)
    if status != "PASS" and os.environ.get("GPT2LAB_STRICT") == "1":
        raise NotPassed(f"{name}: {status} {why}")


def _keep(name: str, status: str) -> None:
    """Note a verdict beside the notebook, but not where notebooks are built or tested."""
    if "ipykernel" not in sys.modules or static():
        return
    with suppress(OSError, ValueError):
        kept = json.loads(Path(KEPT).read_text()) if Path(KEPT).exists() else {}
        with replacing(Path(KEPT)) as file:
            file.write(json.dumps(kept | {name: status}, indent=1).encode())


def verdict(test, *args, **kwargs) -> tuple[str, str]:
    """What `test(*args, **kwargs)` says of an answer: PASS, TODO or FAIL, and the reason or the score.

    Whatever the answer has replaced in the modules that judge it is put back, and is no way to pass.
    """
    if not __debug__:
        return "FAIL", "Python runs with -O or PYTHONOPTIMIZE, which leaves checks out. Start it without"
    before = guarded()
    try:
        with _limited():
            status, why = "PASS", test(*args, **kwargs) or ""
    except (Exception, SystemExit, _Endless) as error:
        status, why = _verdict(error)
    replaced = restored(before)
    if replaced and status == "PASS":
        return (
            "FAIL",
            f"your answer replaces {replaced[0]}, which judges it. It is there again; leave it as it is",
        )
    return status, why


class _Endless(BaseException):
    """The answer took longer than LIMIT. Not an Exception: an answer's own `except` must not stop it."""


@contextmanager
def _limited():
    """Raise _Endless in the block after LIMIT seconds; only a main thread can be stopped in this way."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_):
        raise _Endless

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _verdict(error: BaseException) -> tuple[str, str]:
    """TODO or FAIL and a sentence, also for what a rank raised."""
    if isinstance(error, _Endless):
        return "FAIL", f"no end after {LIMIT:g} s. Does a loop of yours never stop?"
    if unanswered(error):
        return "TODO", "write it, then run this cell again"
    return "FAIL", sentence(error)


def live(fn, *args, ranks: int, what: str = ""):
    """Results of `fn(rank, world_size, *args)` on live ranks, silently, with torch's default dtype of here.

    Raises AssertionError with one sentence when they wait for each other, when a message does not fit, or when
    a rank raises; what a blank exercise raises passes through.
    """
    from ...processes.launch import launch

    with sentences(what):
        return launch(without_frames(fn), *args, ranks=ranks, echo=False, timeout=6)


def without_frames(fn):
    """`fn` for the process of an answer: there is torch's default dtype of here, and no frame of its checker."""
    import torch  # not above: it loads slowly

    return partial(_without_frames, fn, torch.get_default_dtype())


def _without_frames(fn, dtype, *given):
    from ...reference import default_dtype

    said, before = frames_closed(), guarded()
    with default_dtype(dtype):
        found = fn(*given)
    assert not said, said[0]
    replaced = restored(before)
    assert not replaced, f"your answer replaces {replaced[0]}, which judges it. Leave it as it is"
    return found


@contextmanager
def sentences(what: str = ""):
    """What ranks raise in the block becomes one AssertionError with a sentence; a blank exercise stays one."""
    from ...processes.launch import RankFailed

    begin = f"{what}: " if what else ""
    try:
        yield
    except RankFailed as error:
        if unanswered(error):
            raise
        if error.ename in ("Deadlock", "TimeoutError"):
            begin += "the ranks wait for each other for ever. "
        if error.ename == "Mismatch":
            begin += "a message does not fit its receiver. "
        raise AssertionError(f"{begin}{spoken(error)}") from None
