"""Sort the tests into parts: `live` starts ranks, `mutant` plants a bug and demands that it is caught, and so on."""

import gc
import signal
from collections import Counter
from pathlib import Path

import no_address_parser  # noqa: F401
import pytest
import tiers
import torch
from hypothesis import settings
from sandboxed import pytest_pyfunc_call, pytest_terminal_summary  # noqa: F401
from warm import Pools
from xdist.scheduler import LoadFileScheduling

from gpt2lab.processes.launch import Ranks

ROTATE = ("live", "mutant", "browser", "rotates")
"""The marks of tests that run on one day of seven (`tiers`)."""
LONG = ("test_every_cheat", "test_exercises", "test_handed_in")
"""Files whose tests begin first, one by one, so that no worker is left alone with a file at the end: they share
nothing. Then come the files with many tests."""
START = Ranks._living_pool

# The same examples in every run, and no clock: what fails here fails for everybody.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


def pytest_configure(config):
    # A shell that starts the suite in the background has it ignore Ctrl-C, and so would every process of a test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in (
        "live: starts ranks (asks for pools, or says so with this mark: no other test may)",
        "mutant: plants a bug and demands that it is caught (in tests/mutants, or mutant in its name)",
        "browser: drives a real browser",
        "rotates: takes seconds of processor though it starts no ranks: runs on its day, and not in test-quick",
        "gpu: needs a GPU; run by make test-gpu",
        "sandboxed: needs a system that can cut answers off; elsewhere asserts the sentence that says so",
    ):
        config.addinivalue_line("markers", line)


class ByFile(LoadFileScheduling):
    """A worker gets a file at a time, of the long ones a test."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return nodeid if Path(file).stem in LONG else file


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)


def pytest_collection_modifyitems(config, items):
    left = []
    for item in [item for item in items if item.path.suffix == ".py"]:
        folder, name = item.path.parent.name, item.originalname
        says = {
            "live": "pools" in item.fixturenames,
            "browser": folder == "browser",
            "mutant": folder == "mutants" or "mutant" in name,
        }
        for mark in (mark for mark, it_is in says.items() if it_is):
            item.add_marker(mark)
        path, rotates = item.path.relative_to(tiers.ROOT), any(map(item.get_closest_marker, ROTATE))
        left += [] if tiers.runs(path.as_posix(), item.nodeid, rotates) else [item]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    many = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.stem not in LONG, -many[item.path]))


def refuse(_):
    """Instead of the start of ranks."""
    pytest.fail("This test starts ranks: it must ask for pools, or be marked live.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    Ranks._living_pool = START if any(map(item.get_closest_marker, ROTATE)) else refuse


def pytest_collection_finish(session):
    gc.collect()
    gc.freeze()  # what was imported is no garbage: looking through it took a fifth of the time of some tests


@pytest.fixture(autouse=True)
def products_as_torch_comes():
    """A test that trains in this process may have turned oneDNN's products on: not for the next one."""
    yield
    torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.fixture(scope="session")
def pools():
    """The pools of a whole run: files that need ranks of their own (other transports, faults) start them."""
    made = Pools()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def as_before():
    """What a test (or the cell of a lesson that it runs) sets for all of torch does not reach the next test."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
