"""What a rank returns comes back as it was, and a large part of it stays where the rank has written it."""

import os
import pickle
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from planting import rewritten

from gpt2lab.machine.links import Link
from gpt2lab.processes import results
from gpt2lab.schedules import Op
from gpt2lab.verify import Claim

BIG = 300_000  # numbers: more than a result that goes through the pipe
KINDS = {
    "float32": lambda n: torch.arange(n).float(),
    "bfloat16": lambda n: torch.arange(n).bfloat16(),
    "bool": lambda n: torch.arange(n) % 3 == 0,
    "complex": lambda n: torch.arange(n).to(torch.complex64).conj(),
    "transposed": lambda n: torch.arange(2 * n).view(2, n).T,
    "a parameter": lambda n: torch.nn.Parameter(torch.arange(n).float()),
    "a frozen parameter": lambda n: torch.nn.Parameter(torch.arange(n).float(), False),
    "a leaf": lambda n: torch.arange(n).float().requires_grad_(),
    "sparse": lambda n: torch.arange(n).float().to_sparse(),
    "numpy": lambda n: np.arange(n, dtype=np.int16),
    "bytes": lambda n: bytes(range(250)) * (n // 250 + 1),
}


def same(a, b) -> bool:
    """Whether two values have one type and the same contents."""
    if isinstance(a, torch.Tensor):
        alike = (type(a), a.dtype, a.shape, a.requires_grad, a.layout) == (
            type(b), b.dtype, b.shape, b.requires_grad, b.layout,
        )  # fmt: skip
        return alike and torch.equal(a.to_dense(), b.to_dense())
    return type(a) is type(b) and np.array_equal(a, b)


@pytest.fixture(autouse=True)
def nothing_open():
    """A rank keeps the file of its last large result; here is none afterwards."""
    yield
    if results._shared:
        results._shared.close()
        results._shared = None


def returned(value, folder: Path):
    return results.unpack(results.pack(value, folder / "spare"))


@pytest.fixture(params=["shared memory", "a file"])
def way(request, monkeypatch):
    """Both ways of a large result; a system without memory files takes the other."""
    if request.param == "a file":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    elif not hasattr(os, "memfd_create"):
        pytest.skip("this system has no memory files")


@pytest.mark.parametrize("size", [0, 1, 1000, BIG])
def test_every_kind_comes_back_as_it_was(size, way, tmp_path):
    sent = {name: make(size) for name, make in KINDS.items()}
    back = returned(sent, tmp_path)
    assert not [name for name in sent if not same(sent[name], back[name])]
    assert not (tmp_path / "spare").exists()


def test_a_later_result_leaves_an_earlier_one_alone(way, tmp_path):
    first = returned([torch.zeros(BIG), torch.full((2 * BIG,), 5.0)], tmp_path)
    second = returned([torch.ones(BIG), torch.full((2 * BIG,), 7.0)], tmp_path)
    first[0].add_(3)
    assert [float(x.sum()) for x in (*first, *second)] == [3 * BIG, 10 * BIG, BIG, 14 * BIG]


def copied(tmp_path) -> bool:
    """Whether the parent's tensor is anywhere but in the memory that the rank has written."""
    found = returned(torch.zeros(BIG), tmp_path)
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:result" in line]
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    return not any(low <= found.data_ptr() < high for low, high in ranges)


needs_proc = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="looks into /proc")


@needs_proc
def test_a_large_tensor_is_not_copied(tmp_path):
    assert not copied(tmp_path)


@needs_proc
def test_mutant_that_copies_is_noticed(tmp_path):
    with rewritten(results.unpack, "dtype=torch.uint8).numpy()", "dtype=torch.uint8).numpy().copy()"):
        assert copied(tmp_path)


def test_a_result_that_is_kept_holds_no_descriptor(tmp_path):
    kept = [returned(torch.zeros(BIG), tmp_path)]
    before = len(os.listdir("/dev/fd"))
    kept += [returned(torch.zeros(BIG), tmp_path) for _ in range(5)]
    assert len(os.listdir("/dev/fd")) == before


PLAIN = [
    {"a": [1, (2.5, None)], "b": {3, "c"}}, 1 + 2j, Fraction(1, 3), range(2, 9), slice(3),
    torch.Size([2]), torch.float64, np.float64(1.5), np.array(2), Counter("abca"), Link(1e-5, 1e9), Op("F", 0, 1),
    Claim("loss", 0.0), torch.empty(0, 2), torch.ones(3), torch.nn.Parameter(torch.ones(2)),
    torch.ones(4, 3).T, torch.ones(2, requires_grad=True),
]  # fmt: skip
RUNS = {
    "a function": print,
    "one from a cell": lambda: 3,
    "a class": type("Own", (), {}),
    "an object": type("Own", (), {})(),
    "a call": type("Own", (), {"__reduce__": lambda _: (os.system, ("true",))})(),
    "torch.load": type("Own", (), {"__reduce__": lambda _: (torch.load, ("file",))})(),
    "a path": Path("file"),
    "getattr": type("Own", (), {"__reduce__": lambda _: (getattr, (3, "real"))})(),
}


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_a_plain_value_is_read_of_those_whom_nobody_trusts_too(value, tmp_path):
    with results.untrusted():
        found = results.unpack(results.pack(value, tmp_path / "spare"))
    assert type(found) is type(value)
    assert same(found, value) if isinstance(value, torch.Tensor) else found == value


@pytest.mark.parametrize("name", RUNS)
def test_what_would_run_code_is_not_read_of_those_whom_nobody_trusts(name, tmp_path):
    message = results.pack(RUNS[name], tmp_path / "spare")
    with results.untrusted(), pytest.raises(pickle.UnpicklingError, match="is no plain value"):
        results.unpack(message)
    if name == "getattr":
        assert results.unpack(message) == 3  # of others it is
