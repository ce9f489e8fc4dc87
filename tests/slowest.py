"""`pytest -p slowest`: write down how long each test took, for the table at the end of `tests/parts.sh`."""

import os


def pytest_runtest_logreport(report):
    """One line a test of half a second or more, in the file that TEST_SECONDS names: seconds, phase, name."""
    if (path := os.environ.get("TEST_SECONDS")) and report.duration >= 0.5:
        with open(path, "a") as file:
            file.write(f"{report.duration:8.1f} s  {report.nodeid.split('/')[-1]} ({report.when})\n")
