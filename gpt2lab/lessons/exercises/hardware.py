"""Checkers of lesson 02: a stopwatch, ranks' clocks joined, the serial fraction, overlap, work at the same time."""

from itertools import pairwise
from types import SimpleNamespace

from ...planner import metrics
from . import close, returned, unaided
from .engine import Task


def benchmark(answer) -> None:
    """Exercise: time a call with warm-up, barrier and synchronise. A pretended clock sees who calls what when."""
    for count in (3, 2):
        _timed(answer, count)


def _timed(answer, count: int) -> None:
    said, now, pending, true = [], [0.0], [0.0], []

    def call():
        said.append("call")
        seconds = 20.0 if not true else (1.0, 3.0, 2.0)[said.count("call") % 3 - 2]
        true.append(seconds + 2.0)
        now[0] += seconds
        pending[0] += 2.0  # is computed by somebody else, and goes on after the call has returned

    def barrier():
        said.append("barrier")
        now[0] += 5.0

    def synchronise():
        now[0], pending[0] = now[0] + pending[0], 0.0

    clock = lambda: said.append("clock") or now[0]
    got = returned(unaided(answer, "gpt2lab.machine")(call, count, barrier, synchronise, clock))
    assert hasattr(got, "__len__"), f"return the list of all durations, not only {got}"
    assert len(got) == count, f"{count} trials were asked for, you returned {len(got)} times"
    assert "clock" in said, "the time comes from clock(), which was never asked"
    assert 22.0 not in got and 20.0 not in got, "the first call takes 20 s: warm up, and leave that call out"
    assert said.count("call") > count, "the first call is not one to count: call once more, as warm-up"
    assert not any(t >= 6 for t in got), "the 5 s of waiting in the barrier are among your times"
    assert "barrier" in said, "without a barrier a trial contains the wait for ranks that come late"
    want = true[-count:]
    assert len(set(got)) > 1, (
        f"trials lasted {want}, you return {list(got)}: each trial has a time of its own"
    )
    assert sorted(got) != sorted(want) or list(got) == want, (
        f"trials lasted {want}, you return {list(got)}: keep their order, it shows what warms up and what drifts"
    )
    assert all(g > w - 1 for g, w in zip(got, want, strict=True)), (
        "the clock stopped before the work was done: synchronise first (2 s after each call)"
    )
    assert got[0] < want[0] + 1.5, (
        "the work of the warm-up is still going on in the first trial: synchronise after it too"
    )
    close(got, want, "the time of each call and 2 s until its work is done")
    calls = [place for place, what in enumerate(said) if what == "call"][-count - 1 :]
    trials = [said[a:b] for a, b in pairwise(calls)]
    apart = [one for one in trials if "barrier" not in one]
    assert not apart, "ranks drift apart again: a barrier before *every* trial"
    late = [one for one in trials if "clock" not in one[one.index("barrier") :]]
    assert not late, "the barrier belongs before the clock starts"


def _worked(*spans: tuple[int, float, float]) -> tuple[list[SimpleNamespace]]:
    return ([SimpleNamespace(rank=rank, start=start, end=end) for rank, start, end in spans],)


def _met(chance) -> tuple[list[tuple[float, float]]]:
    """Starts and ends of some ranks in a collective: nobody ends before all have started."""
    starts = [chance.randint(0, 40) / 4 for _ in range(chance.randint(1, 8))]
    return ([(start, max(starts) + chance.randint(1, 20) / 4) for start in starts],)


together = Task(
    lambda per_rank: max(end for _, end in per_rank) - max(start for start, _ in per_rank),
    shown={
        "two ranks that start and end together": ([(0.0, 3.0), (0.0, 3.0)],),
        "rank 0 waits 5 s for rank 1: that wait is not the collective's": ([(0.0, 6.0), (5.0, 6.5)],),
        "it is over when the *last* rank is done": ([(1.0, 4.0), (0.0, 6.0), (2.0, 5.0)],),
    },
    what="starts and ends {}",
    drawn=_met,
)
"""Exercise: how long a collective took, from every rank's start and end."""

serial_fraction = Task(
    metrics.karp_flatt,
    shown={
        "a speed-up of 4 on 4 workers has no serial part": (4.0, 4),
        "a speed-up of 2 on 4 workers": (2.0, 4),
        "no speed-up: all is serial": (1.0, 4),
        "half as fast as one worker: more than all is serial": (0.5, 4),
        "24.7 on 112 (turn Amdahl's law round)": (24.7, 112),
    },
    what="a speed-up of {} on {} workers",
    drawn=lambda chance: (chance.randint(4, 40) / 4, chance.randint(11, 99)),
    closed=("gpt2lab.planner",),
)
"""Exercise: Karp and Flatt's serial fraction."""

overlap = Task(
    metrics.overlapped,
    shown={
        "one piece: nothing to overlap with": (1, 20.0, 15.0),
        "4 pieces, 20 to compute, 15 to send: the last one still has to travel": (4, 20.0, 15.0),
        "4 pieces, 15 to compute, 20 to send: now the link is never idle": (4, 15.0, 20.0),
        "7 pieces, 2 to compute, 5 to send": (7, 2.0, 5.0),
    },
    what="{} pieces, {} to compute, {} to send",
    drawn=lambda chance: (chance.randint(1, 20), chance.randint(1, 40) / 2, chance.randint(1, 40) / 2),
    closed=("gpt2lab.planner",),
)
"""Exercise: the time of pieces that travel while the next is computed."""

SPANS = (0, 2, 6), (1, 4, 6), (1, 8, 10)


def _many(chance) -> tuple[list[SimpleNamespace]]:  # on each rank one after the other
    starts = [(turn % 3, 3 * turn + chance.randint(0, 3)) for turn in range(chance.randint(1, 9))]
    return _worked(*((rank, start, start + chance.randint(1, 6)) for rank, start in starts))


average_parallelism = Task(
    lambda spans: (
        sum(s.end - s.start for s in spans) / (max(s.end for s in spans) - min(s.start for s in spans))
    ),
    shown={
        "8 s of work within 8 s: from the first start (2) to the last end (10)": _worked(*SPANS),
        "16 s of work within 8 s, 3 ranks": _worked(*SPANS, (2, 2, 10)),
        "the same 8 s within 8 s, spans in no order of time": _worked(*SPANS[::-1]),
    },
    drawn=_many,
    closed=("gpt2lab.planner",),
)
"""Exercise: how many ranks work at the same time, on average."""
