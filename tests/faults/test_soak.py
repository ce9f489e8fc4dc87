"""Many random faults in a row: the right verdict each time, and nothing grows. `SOAK=1000 pytest ...` takes as many."""

import os
import sys
import time

import pytest
import random_faults
from planting import planted
from processes import needs_backend, promptly
from random_faults import HANG, HANGS, RANKS, SCENES, kinds_of, misbehave, right_verdict, soak

from gpt2lab import RankFailed, Ranks, launch, transport
from gpt2lab.processes import deadlock, watch

pytestmark = [pytest.mark.live, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

MANY = int(os.environ.get("SOAK", "200"))
MEGABYTES = 16  # more growth than this between the 40th and the last fault is a leak


@pytest.fixture(params=["gloo", "shm"])
def backend(request):
    """Each backend that this machine and this version have."""
    needs_backend(request.param)
    launch(random_faults.total, ranks=1, backend=request.param)
    return request.param


@pytest.mark.parametrize(
    "count",
    [25, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(60 + 5 * MANY)])],
    ids=["few", "many"],
)
def test_each_fault_gets_its_verdict_and_nothing_grows(count, backend, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = soak(count, backend, tmp_path)
    print(
        f"{backend}: {dict(found.kinds)}, {dict(found.scenes)}, slowest verdict {found.slowest:.2f} s",
        found.early,
        found.late,
    )
    assert not found.wrong, "\n".join(found.wrong)
    assert set(found.kinds) == set(kinds_of(backend)) and len(found.scenes) >= min(count // 5, len(SCENES))
    early, late = found.early, found.late
    assert (early.descriptors, early.threads) == (late.descriptors, late.threads)
    assert early.children == late.children and early.files == late.files
    if count > 100:
        assert late.kilobytes - early.kilobytes < MEGABYTES * 1024, (early, late)
    assert not list(tmp_path.glob("gpt2lab-*"))


@pytest.fixture(scope="module")
def pool():
    with Ranks(RANKS, echo=False) as ranks:
        yield ranks


def seconds_to_the_verdict(pool, kind: str) -> float:
    """From the start of a run on living ranks until a fault in it is told; for a hang, from its timeout on."""
    pool.timeout = 60.0
    pool.run(random_faults.total)
    pool.timeout = HANG if kind in HANGS else 60.0
    start = time.monotonic()
    with pytest.raises(RankFailed) as info:
        pool.run(misbehave, kind, 1, 1)
    took = time.monotonic() - start
    assert right_verdict(kind, 1, info.value), info.value
    return took - (HANG if kind in HANGS else 0)


@pytest.mark.parametrize("kind", kinds_of(transport.default()))
def test_each_fault_is_told_in_time(kind, pool):
    promptly(lambda: seconds_to_the_verdict(pool, kind), 1.0 if kind in HANGS else 2.0)


@pytest.mark.parametrize(
    ("kind", "bug"),
    [
        ("SIGKILL", (watch.Watch, "_blame", lambda right: lambda self: (time.sleep(2), right(self)))),
        ("circle of messages", (deadlock, "PATIENCE", lambda right: 2.5)),
    ],
)
def test_mutant_that_hesitates_is_noticed(kind, bug, pool):
    with planted(*bug), pytest.raises(AssertionError, match=r"promised within 2 s, took \d"):
        promptly(lambda: seconds_to_the_verdict(pool, kind), 2.0, tries=2)


def pool_that_keeps(what):
    """A pool whose `close` forgets to give something back."""

    class Leaky(Ranks):
        kept = []

        def close(self):
            if self._pool is not None and what == "descriptor":
                self.kept.append(os.open("/dev/null", os.O_RDONLY))
            elif self._pool is not None and what == "folder":
                self.kept.append(self._pool.folder.parent / f"left-{len(self.kept)}")
                self.kept[-1].touch()
            super().close()

    return Leaky


@pytest.mark.parametrize("what", ["descriptor", "folder"])
def test_mutant_that_leaks_is_noticed(what, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    leaky = pool_that_keeps(what)
    monkeypatch.setattr(random_faults, "Ranks", leaky)
    monkeypatch.setattr(random_faults, "KINDS", ["raise", "exit code 0"])
    found = soak(4, "gloo", tmp_path)
    assert not found.wrong
    name = {"descriptor": "descriptors", "folder": "files"}[what]
    assert getattr(found.late, name) > getattr(found.early, name)
    if what == "descriptor":
        for descriptor in leaky.kept:
            os.close(descriptor)


@pytest.mark.parametrize(
    "kind", ["raise", "SIGKILL", "SIGKILL inside a call", "two calls swapped", "unpicklable result"]
)
def test_mutant_that_blames_another_rank_is_noticed(kind, tmp_path, monkeypatch):
    """The soak's own eyes: when the culprit is one rank further than planned, its verdict is called wrong."""
    right = random_faults.misbehave
    shifted = lambda rank, world, kind, culprit, *rest: right(rank, world, kind, (culprit + 1) % world, *rest)
    monkeypatch.setattr(random_faults, "misbehave", shifted)
    monkeypatch.setattr(random_faults, "KINDS", [kind])
    assert len(soak(2, "gloo", tmp_path).wrong) == 2
