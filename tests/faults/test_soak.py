"""Many random faults in a row: the right verdict each time, and nothing grows. `SOAK=1000 pytest ...` takes as many."""

import math
import os
import signal
import sys
import threading
import time
from dataclasses import fields

import pytest
import random_faults
from held import Held
from planting import planted
from processes import PATIENCE, Marked, needs_backend, promptly
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
    found.late.check(found.early, MEGABYTES if count > 100 else math.inf)
    assert not list(tmp_path.glob("gpt2lab-*"))


@pytest.mark.slow
@pytest.mark.timeout(60 + 5 * MANY)
def test_many_launches_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for number in range(MANY):
        launch(random_faults.total, ranks=2, echo=False)
        if number == 10:
            early = Held.now(tmp_path)
    Held.now(tmp_path).check(early, MEGABYTES)


TRAIN = """
from gpt2lab import cli
cli.main("train --plan dp=2 --batch 4 --sequence 8 --evaluate 50 --save 200 --keep 2 --sample 0 --no-fast".split()
         + ["--steps", "1000000000", "--out", {out!r}])
"""


@pytest.mark.slow
@pytest.mark.timeout(120 + MANY)
def test_a_long_training_run_holds_no_more_in_the_end(tmp_path):
    """A sample may fall into a save; what leaks is in every sample. A rank's log of calls fills up for a while."""
    samples = []
    with Marked(TRAIN.format(out=str(tmp_path / "runs")), tmp_path) as running:
        running.wait_for_line("step 200:")
        threading.Thread(target=running.process.stdout.read).start()
        for _ in range(MANY):
            time.sleep(0.3)
            everyone = [running.process.pid, *running.others()]
            samples.append([Held.now(running.temp, pid) for pid in everyone])
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE) == 0 and not running.folders()
    assert {len(sample) for sample in samples} == {len(samples[0])}
    least = lambda part, what: sum(
        min(getattr(h, what) for h in of_one) for of_one in zip(*part, strict=True)
    )
    early, late = (
        Held(*(least(part, field.name) for field in fields(Held)))
        for part in (samples[MANY // 5 : 2 * MANY // 5], samples[-MANY // 5 :])
    )
    late.check(early, 3 * MEGABYTES)


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
