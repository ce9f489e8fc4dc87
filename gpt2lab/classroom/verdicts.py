"""What a verdict is, and how a process ended: said by those who judge and by those who watch them."""

import contextlib
import signal

STATUSES = ("PASS", "FAIL", "TODO")
"""What a verdict can be."""
WORDS = 600
"""Characters of a verdict's words that are kept."""
ENDED = "the process that ran your code ended in the middle of it"
TOLD = "your code wrote to its judge, or the judge said what none says"


def is_verdict(found) -> bool:
    """Whether this is the name of an exercise, a status that is known, and words."""
    match found:
        case [str(), status, str(words)]:
            return status in STATUSES and len(words) <= WORDS
    return False


def late(seconds: float) -> str:
    """The words of an answer that does not end."""
    return f"no end after {seconds:g} s. Does a loop of yours never stop?"


def ended(code: int | None) -> str:
    """How a process ended, by its exit code: by a signal where that is below 0, or above 128 as shells say it."""
    number = code - 128 if code and code > 128 else -(code or 0)
    how = f"exit status {code}"
    with contextlib.suppress(ValueError):
        how = f"killed by {signal.Signals(number).name}"
    return f"{ENDED} ({how})"
