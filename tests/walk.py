"""Which files of the package a call enters, as Python's own profiler sees it."""

import sys
from pathlib import Path

import gpt2lab

PACKAGE = Path(gpt2lab.__file__).parent


def entered(act) -> list[str]:
    """The files of the package in which a function was called while `act()` ran, in this thread."""
    seen = set()

    def note(frame, event, _):
        if event == "call":
            seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    inside = [Path(name).relative_to(PACKAGE) for name in seen if name.startswith(f"{PACKAGE}/")]
    return sorted(str(path.with_suffix("")) for path in inside)
