"""What takes longer than a reader waits for says after five seconds how long the rest will take."""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized

AFTER = 5.0  # seconds


def patiently(steps: Iterable, what: str, total: int | None = None, falling: str = "") -> Iterator:
    """Go through `steps`, of which there are `total` where they have no length; `what` they are, in the plural;
    `falling`: why later ones take less.

    After AFTER seconds one line on stderr says how many are done and how long the others take. While lessons are built
    it says nothing, as their texts must not depend on the machine.
    """
    total = len(steps) if total is None and isinstance(steps, Sized) else total
    begin, said = time.perf_counter(), "GPT2LAB_STATIC" in os.environ
    for done, step in enumerate(steps):
        if not said and (passed := time.perf_counter() - begin) > AFTER:
            said = True
            rest = "nobody knows how many are left"
            if total is not None and done:
                how, why = ("far less than", f": {falling}") if falling else ("about", "")
                rest = f"the other {total - done:,} take {how} {rounded_time((total - done) * passed / done)}{why}"
            print(
                f"{done:,} {what} took {passed:.0f} s; {rest}. Ctrl-C ends it.", file=sys.stderr, flush=True
            )
        yield step


def rounded_time(seconds: float) -> str:
    """Seconds in the unit in which they are a number that one can imagine."""
    for size, unit in ((86_400 * 365, "years"), (86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"
