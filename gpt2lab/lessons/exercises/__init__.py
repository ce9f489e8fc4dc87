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
from functools import wraps
from pathlib import Path

from ...corpus.storage import replacing
from ..environment import static

LIMIT = 100.0
"""Seconds after which an answer is stopped, so that one that never ends does not stop Run All."""

STATUS: dict[str, str] = {}
"""The last verdict of every exercise checked in this process: PASS, TODO or FAIL."""


KEPT = ".gpt2lab-progress.json"
"""The file in a notebook's folder that keeps the last verdicts, for `gpt2lab progress`."""


class NotPassed(AssertionError):
    """Raised in strict mode by `check` when an exercise is not PASS."""


def check(name: str, test, *args, **kwargs) -> None:
    """Run `test(*args, **kwargs)` and print one line: PASS, TODO (not written yet) or FAIL with the reason.

    What the test returns, such as a score (see `scored`), stands behind PASS.
    With GPT2LAB_STRICT=1 in the environment, as when solutions are built, anything but PASS raises NotPassed.
    """
    status, why = verdict(test, *args, **kwargs)
    STATUS[name] = status
    _keep(name, status)
    print(f"{status}  {name}" + (f": {why}" if why else ""))
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
    """What `test(*args, **kwargs)` says of an answer: PASS, TODO or FAIL, and the reason or the score."""
    try:
        with _limited():
            return "PASS", test(*args, **kwargs) or ""
    except (Exception, SystemExit, _Endless) as error:
        return _verdict(error)


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
    """TODO or FAIL and a sentence, also for what a rank raised (`ename` is the type's name over there)."""
    kind = getattr(error, "ename", "") or type(error).__name__
    if isinstance(error, _Endless):
        return "FAIL", f"no end after {LIMIT:g} s. Does a loop of yours never stop?"
    if kind == "NotImplementedError":
        return "TODO", "write it, then run this cell again"
    if isinstance(error, AssertionError):
        return "FAIL", str(
            error
        ) or "an assertion without words; run the checker's lines by hand to see which"
    return "FAIL", f"{kind}: {error}"


def live(fn, *args, ranks: int, what: str = ""):
    """Results of `fn(rank, world_size, *args)` on live ranks, silently.

    Raises AssertionError with one sentence when they wait for each other, when a message does not fit, or when
    a rank raises; what is not written yet stays NotImplementedError.
    """
    from ...processes.launch import launch

    with sentences(what):
        return launch(fn, *args, ranks=ranks, echo=False, timeout=6)


@contextmanager
def sentences(what: str = ""):
    """What ranks raise in the block becomes one AssertionError with a sentence; NotImplementedError passes through."""
    from ...processes.launch import RankFailed

    begin = f"{what}: " if what else ""
    try:
        yield
    except RankFailed as error:
        if error.ename == "NotImplementedError":
            raise
        if error.ename in ("Deadlock", "TimeoutError"):
            raise AssertionError(f"{begin}the ranks wait for each other for ever. {error}") from None
        if error.ename == "Mismatch":
            raise AssertionError(f"{begin}a message does not fit its receiver. {error}") from None
        last = str(error).strip().splitlines()[-1]
        raise AssertionError(f"{begin}{last}") from None


# no_grad, and messages
OPEN = ("torch.autograd.grad_mode", "torch.autograd.function", "torch._functorch.utils")


@contextmanager
def closed(
    *modules: str, words: str = "torch would do this in one call; here it is closed. Write what it does"
):
    """Calling a Python function of these modules raises AssertionError in the block: they are what is to be written."""

    def watch(frame, event, _):
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith(modules) and name not in OPEN:
            raise AssertionError(
                words
                if name.startswith("torch.")
                else f"{name}.{frame.f_code.co_name} knows the answer, and it is closed here. Write it yourself"
            )

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)


def unaided(answer, *modules: str):
    """`answer` with these modules closed to it."""

    @wraps(answer)
    def tried(*args, **kwargs):
        with closed(*modules):
            return answer(*args, **kwargs)

    return tried


def by_hand():
    """No autograd in the block: an answer that asks it for the backward it should write raises AssertionError."""
    words = (
        "autograd would give this in one call; here it is closed. Write what it does, with products and sums"
    )
    return closed("torch.autograd", "torch._functorch", "torch._ops", words=words)


def scored(found: float, unit: str, *, bar: float, best: float) -> str:
    """Words about the score of a puzzle, less is better: `bar` is what passes, `best` the least that is known.

    Raises AssertionError with all three numbers when `found` is above the bar.
    """
    assert found <= bar, f"{found:g} {unit}; at most {bar:g} pass, and the best known answer has {best:g}."
    if found < best:
        return f"{found:g} {unit}, better than the best known answer ({best:g})!"
    return f"{found:g} {unit} (bar {bar:g}, best known {best:g})"


def returned(found, what: str = ""):
    """What an answer gave. Raises AssertionError where that is nothing: most often a forgotten return."""
    begin = f"{what}: " if what else ""
    assert found is not None, f"{begin}your function returned None. Is the return missing?"
    return found


def close(got, want, what: str, tolerance: float = 1e-10) -> None:
    """Raise AssertionError with both numbers unless `got` is within `tolerance`, relative to `want`.

    Works for numbers, arrays and tensors; a wrong shape is named as such, and None as a forgotten return.
    """
    import numpy as np

    returned(got, what)
    got, want = (np.asarray(x.detach() if hasattr(x, "detach") else x, dtype=float) for x in (got, want))
    assert got.shape == want.shape, f"{what}: expected shape {want.shape}, got {got.shape}"
    if not want.size:
        return
    error, scale = np.abs(got - want), max(float(np.abs(want).max()), 1e-300)
    worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    where = f" at {tuple(map(int, worst))}" if want.shape else ""
    message = f"{what}: expected {want[worst]:.6g}{where}, got {got[worst]:.6g}"
    if error[worst] < 3e-6 * scale:
        message += f", off by {error[worst] / scale:.0e} of it: was it float32 on the way?"
    assert bool((error <= tolerance * scale).all()), message
