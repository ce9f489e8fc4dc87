"""Notes which functions of the package this process enters, for each test: in every process with POWER_REACH set.

The number of the test that runs stands in a file that all processes map; a function that is entered for the first
time since that number changed is one line of this process's own file.
"""

import os
import sys
import threading


def _record(folder: str) -> None:
    import mmap

    with open(f"{folder}/now", "r+b") as file:
        page = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
    root = os.environ["POWER_ROOT"] + "/"
    seen, state = set(), {"test": -1, "pid": 0, "out": None}

    def enter(frame, event, arg):
        test = page[0]
        if test != state["test"]:
            seen.clear()
            state["test"] = test
        code = frame.f_code
        if id(code) not in seen:
            seen.add(id(code))
            if code.co_filename.startswith(root):
                if state["pid"] != os.getpid():
                    state["pid"] = os.getpid()
                    name = f"{folder}/{os.getpid()}.seen"
                    state["out"] = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                line = f"{test}\t{code.co_filename[len(root) :]}\t{code.co_qualname}\n"
                try:
                    os.write(state["out"], line.encode())
                except OSError:  # a test has closed it
                    state["pid"] = 0
        return None

    threading.settrace(enter)
    sys.settrace(enter)


if "POWER_REACH" in os.environ:
    _record(os.environ["POWER_REACH"])
