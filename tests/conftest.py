"""Sort the tests into parts: `live` starts ranks, `mutant` plants a bug and demands that it is caught, `browser`."""

import re
import signal

import pytest
import torch

STARTS_RANKS = re.compile(r"\b(?:Ranks|launch|verify)\(|\bpools\b")


def pytest_configure(config):
    # A shell that starts the suite in the background has it ignore Ctrl-C, and so would every process of a test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in (
        "live: starts ranks (every test of a file that does)",
        "mutant: plants a bug and demands that it is caught (in tests/mutants, or mutant in its name)",
        "browser: drives a real browser",
    ):
        config.addinivalue_line("markers", line)


def pytest_collection_modifyitems(items):
    text = {}
    for item in items:
        if item.path.suffix != ".py":
            continue
        if item.path not in text:
            text[item.path] = item.path.read_text()
        if item.path.parent.name == "browser":
            item.add_marker("browser")
        if STARTS_RANKS.search(text[item.path]):
            item.add_marker("live")
        if item.path.parent.name == "mutants" or "mutant" in item.originalname:
            item.add_marker("mutant")


class Pools(dict):
    """Live ranks by their number, `pools[3]`, started when first asked for."""

    def __missing__(self, ranks: int):
        from gpt2lab import Ranks

        self[ranks] = Ranks(ranks, timeout=120, echo=False)
        return self[ranks]


@pytest.fixture(scope="module")
def pools():
    """The pools of one file of tests."""
    made = Pools()
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture(autouse=True)
def as_before():
    """What a test (or the cell of a lesson that it runs) sets for all of torch does not reach the next test."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
