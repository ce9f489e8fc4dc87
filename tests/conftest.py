"""Sort the tests into parts: `live` starts ranks, `mutant` plants a bug and demands that it is caught, `browser`."""

import re
import signal

import no_address_parser  # noqa: F401
import pytest
import torch
from hypothesis import settings
from warm import Pools

STARTS_RANKS = re.compile(r"\b(?:Ranks|launch|verify)\(|\bpools\b")
PLANTS = re.compile(r"def test_\w*mutant")

# The same examples in every run, and no clock: what fails here fails for everybody.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


def pytest_configure(config):
    # A shell that starts the suite in the background has it ignore Ctrl-C, and so would every process of a test.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in (
        "live: starts ranks (every test of a file that does)",
        "mutant: plants a bug and demands that it is caught (in tests/mutants, or mutant in its name)",
        "browser: drives a real browser",
        "gpu: needs a GPU; run by make test-gpu",
    ):
        config.addinivalue_line("markers", line)


def parts_of(path, text: str) -> set[str]:
    """Which of the marks tests of a file can carry."""
    kinds = {"browser"} if path.parent.name == "browser" else set()
    kinds |= {"live"} if STARTS_RANKS.search(text) or "mark.live" in text else set()
    return kinds | ({"mutant"} if path.parent.name == "mutants" or PLANTS.search(text) else set())


def pytest_ignore_collect(collection_path, config):
    """Do not even import a file of which `-m "live and not mutant"` wants no test."""
    asked = config.option.markexpr
    if not asked or " or " in asked or not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    kinds = parts_of(collection_path, collection_path.read_text())
    wanted = {(not no, kind) for no, kind in re.findall(r"\b(not )?(live|mutant|browser)\b", asked)}
    whole = kinds - {"mutant"} | ({"mutant"} if collection_path.parent.name == "mutants" else set())
    lacks = any(yes and kind not in kinds for yes, kind in wanted)
    return lacks or any(not yes and kind in whole for yes, kind in wanted) or None


def pytest_collection_modifyitems(items):
    kinds = {}
    for item in items:
        if item.path.suffix != ".py":
            continue
        if item.path not in kinds:
            kinds[item.path] = parts_of(item.path, item.path.read_text())
        for kind in kinds[item.path] - {"mutant"}:
            item.add_marker(kind)
        if item.path.parent.name == "mutants" or "mutant" in item.originalname:
            item.add_marker("mutant")


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
