"""What takes longer than a reader waits for says after five seconds how long the rest will take."""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized

AFTER = 5.0  # seconds


def patiently(steps: Iterable, what: str, total: int | None = None, falling: str = "") -> Iterator:
    """Go through `steps`, of which there are `total` where they have no length; `what` they are, in the plural;
    `falling`: why later ones take less.

    After AFTER seconds one line on stderr says how many are done and how long the others take, unless they are nearly
    over. While lessons are built it says nothing, as their texts must not depend on the machine.
    """
    total = len(steps) if total is None and isinstance(steps, Sized) else total
    begin, said = time.perf_counter(), "GPT2LAB_STATIC" in os.environ
    for done, step in enumerate(steps):
        passed = 0 if said else time.perf_counter() - begin
        if passed > AFTER and (line := _line(done, total, what, passed, falling)):
            said = True
            print(line, file=sys.stderr, flush=True)
        yield step


def _line(done: int, total: int | None, what: str, passed: float, falling: str) -> str:
    """What is said after so many seconds; nothing where the rest is nearly over."""
    if total is None or not done:
        return f"{done:,} {what} took {passed:.0f} s; nobody knows how many are left. Ctrl-C ends it."
    left = (total - done) * passed / done
    how, why = ("far less than", f": {falling}") if falling else ("about", "")
    rest = f"the other {total - done:,} take {how} {rounded_time(left)}{why}"
    said = f"{done:,} of {total:,} {what} took {passed:.0f} s; {rest}. Ctrl-C ends it."
    return said if left >= AFTER / 5 else ""


def rounded_time(seconds: float) -> str:
    """Seconds in the unit in which they are a number that one can imagine."""
    for size, unit in ((86_400 * 365, "years"), (86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"
