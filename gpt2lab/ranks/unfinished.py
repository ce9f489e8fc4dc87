"""Calls on a GPU that this rank has waited for, and that are not over: `wait` there orders only the GPU's own work.

The host goes on, so that a rank that hangs in such a call stands anywhere in its program. The oldest of them stays on
the status board until it is over; a thread looks, as the host may make no call any more.
"""

import threading
import time
from collections import deque

from ..processes import status_board

LOOK_EVERY = 0.1  # seconds
calls: deque = deque()  # (torch's Work, what puts its call on the board)
_entry = None  # of the one that the board shows
_looks: threading.Thread | None = None


def keep(work, enter) -> None:
    """Have `enter(instead=entry)` put a call on the board again, as long as its work is not completed."""
    global _looks
    calls.append((work, enter))
    if _looks is None:
        _looks = threading.Thread(target=_look, name="unfinished calls", daemon=True)
        _looks.start()


def show_oldest() -> None:
    """Publish that this rank is in no call of the host, but in the oldest of these, if there is one."""
    global _entry
    while calls and calls[0][0].is_completed():
        calls.popleft()
    _entry = calls[0][1](instead=None) if calls else status_board.leave()


def _look() -> None:
    """While the host makes no call: show the next when the one that is shown is over."""
    global _entry
    shown = None
    while True:
        time.sleep(LOOK_EVERY)
        if (entry := _entry) is None:
            continue
        left = next((enter for work, enter in list(calls) if not work.is_completed()), None)
        if left is None:
            status_board.leave(entry)
        elif left is not shown:
            shown, after = left, left(instead=entry)
            if _entry == entry:
                _entry = after
