"""Tests marked `sandboxed` need a system that can cut answers off; elsewhere each asserts the sentence that says so.

At the end of a run one line counts which way they went, whatever the number of workers.
"""

from collections import Counter

from gpt2lab.classroom import sandbox

WAYS = "cut off", "by the sentence of what is missing"


def pytest_pyfunc_call(pyfuncitem):
    """In place of a marked test, where this system has no sandbox: does the report say what it lacks?"""
    if not pyfuncitem.get_closest_marker("sandboxed"):
        return None
    pyfuncitem.user_properties.append(("sandbox", WAYS[not sandbox.isolated()]))
    if sandbox.isolated():
        return None
    assert f"could not cut answers off ({sandbox.missing()})" in sandbox.sentence()
    return True


def pytest_terminal_summary(terminalreporter):
    """One line, if a marked test has run."""
    ways = Counter(
        way
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, way in report.user_properties
        if name == "sandbox"
    )
    if ways:
        said = ", ".join(f"{ways[way]} {way}" for way in WAYS)
        terminalreporter.write_line(f"sandbox: {sum(ways.values())} tests of answers ran, {said}")
