"""A plugin of pytest that says which test runs now, and writes what each took."""

import json
import mmap
import os
import time
from pathlib import Path

FOLDER = Path(os.environ["POWER_REACH"])


class Said:
    """Tells all processes the number of the test that runs."""

    def __init__(self):
        with open(FOLDER / "now", "r+b") as file:
            self.page = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
        self.number = 0

    def begin(self, name: str) -> None:
        """A new test begins."""
        self.number += 1
        self.page[0], self.name, self.start = self.number, name, time.monotonic()

    def end(self, passed: bool) -> None:
        """Write its line."""
        line = {"number": self.number, "test": self.name, "passed": passed}
        line["seconds"] = round(time.monotonic() - self.start, 3)
        with open(FOLDER / "tests.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")


said = Said()
failed = set()


def pytest_runtest_logstart(nodeid, location):
    """A test begins."""
    said.begin(nodeid)


def pytest_runtest_logreport(report):
    """Whether it passed, its setup and teardown included."""
    if report.failed:
        failed.add(report.nodeid)


def pytest_runtest_logfinish(nodeid, location):
    """A test has ended."""
    said.end(nodeid not in failed)
