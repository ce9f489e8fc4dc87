"""Checkers of the lessons' exercises, one module a lesson.

A checker is a function that takes a learner's answer and raises `AssertionError` with a sentence that helps;
it knows nothing of notebooks. `check` runs one and prints PASS, TODO or FAIL, so that Run All always reaches
the end.
"""

import os

STATUS: dict[str, str] = {}
"""The last verdict of every exercise checked in this process: PASS, TODO or FAIL."""


class NotPassed(AssertionError):
    """Raised in strict mode by `check` when an exercise is not PASS."""


def check(name: str, test, *args, **kwargs) -> None:
    """Run `test(*args, **kwargs)` and print one line: PASS, TODO (not written yet) or FAIL with the reason.

    With GPT2LAB_STRICT=1 in the environment, as when solutions are built, anything but PASS raises NotPassed.
    """
    try:
        test(*args, **kwargs)
        status, why = "PASS", ""
    except Exception as error:
        status, why = _verdict(error)
    STATUS[name] = status
    print(f"{status}  {name}" + (f": {why}" if why else ""))
    if status != "PASS" and os.environ.get("GPT2LAB_STRICT") == "1":
        raise NotPassed(f"{name}: {status} {why}")


def _verdict(error: Exception) -> tuple[str, str]:
    """TODO or FAIL and a sentence, also for what a rank raised (`ename` is the type's name over there)."""
    kind = getattr(error, "ename", "") or type(error).__name__
    if kind == "NotImplementedError":
        return "TODO", "write it, then run this cell again"
    if isinstance(error, AssertionError):
        return "FAIL", str(
            error
        ) or "an assertion without words; run the checker's lines by hand to see which"
    return "FAIL", f"{kind}: {error}"


def close(got, want, what: str, tolerance: float = 1e-10) -> None:
    """Raise AssertionError with both numbers unless `got` is within `tolerance`, relative to `want`.

    Works for numbers, arrays and tensors; a wrong shape is named as such, and None as a forgotten return.
    """
    import numpy as np

    assert got is not None, f"{what}: your function returned None. Is the return missing?"
    got, want = (np.asarray(x.detach() if hasattr(x, "detach") else x, dtype=float) for x in (got, want))
    assert got.shape == want.shape, f"{what}: expected shape {want.shape}, got {got.shape}"
    if not want.size:
        return
    error, scale = np.abs(got - want), max(float(np.abs(want).max()), 1e-300)
    worst = np.unravel_index(np.argmax(np.nan_to_num(error, nan=np.inf)), error.shape)
    where = f" at {tuple(map(int, worst))}" if want.shape else ""
    message = f"{what}: expected {want[worst]:.6g}{where}, got {got[worst]:.6g}"
    assert bool((error <= tolerance * scale).all()), message
