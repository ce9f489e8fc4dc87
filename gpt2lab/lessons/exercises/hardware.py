"""Checkers of lesson 02: a stopwatch, ranks' clocks joined, the serial fraction, overlap, work at the same time."""

from types import SimpleNamespace

from ...planner import metrics
from . import close, returned, unaided


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
    got = returned(answer(call, count, barrier, synchronise, clock))
    assert hasattr(got, "__len__"), f"return the list of all durations, not only {got}"
    assert len(got) == count, f"{count} trials were asked for, you returned {len(got)} times"
    assert "clock" in said, "the time comes from clock(), which was never asked"
    assert 22.0 not in got and 20.0 not in got, "the first call takes 20 s: warm up, and leave that call out"
    assert said.count("call") > count, (
        "the first of your calls is not one to count: call once more, as warm-up"
    )
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
    first = said.index("clock")
    assert "barrier" in said[:first], "the barrier belongs before the clock starts"
    assert said.count("barrier") >= count, "ranks drift apart again: a barrier before *every* trial"


def together(answer) -> None:
    """Exercise: how long a collective took, from every rank's start and end."""
    close(answer([(0.0, 3.0), (0.0, 3.0)]), 3.0, "two ranks that start and end together")
    late = [(0.0, 6.0), (5.0, 6.5)]
    close(answer(late), 1.5, "rank 0 waits 5 s for rank 1: that wait is not the collective's")
    close(answer([(1.0, 4.0), (0.0, 6.0), (2.0, 5.0)]), 4.0, "it is over when the *last* rank is done")


def serial_fraction(answer) -> None:
    """Exercise: Karp and Flatt's serial fraction."""
    answer = unaided(answer, "gpt2lab.planner")
    close(answer(4.0, 4), 0.0, "a speed-up of 4 on 4 workers has no serial part")
    close(answer(2.0, 4), 1 / 3, "a speed-up of 2 on 4 workers")
    close(answer(1.0, 4), 1.0, "no speed-up: all is serial")
    close(answer(24.7, 112), metrics.karp_flatt(24.7, 112), "24.7 on 112 (turn Amdahl's law round)")


def overlap(answer) -> None:
    """Exercise: the time of pieces that travel while the next is computed."""
    answer = unaided(answer, "gpt2lab.planner")
    close(answer(1, 20.0, 15.0), 35.0, "one piece: nothing to overlap with")
    close(
        answer(4, 20.0, 15.0), 95.0, "4 pieces, 20 to compute, 15 to send: the last one still has to travel"
    )
    close(answer(4, 15.0, 20.0), 95.0, "4 pieces, 15 to compute, 20 to send: now the link is never idle")
    close(answer(7, 2.0, 5.0), 37.0, "7 pieces, 2 to compute, 5 to send")


def average_parallelism(answer) -> None:
    """Exercise: how many ranks work at the same time, on average."""
    answer = unaided(answer, "gpt2lab.planner")
    trace = [
        SimpleNamespace(rank=rank, start=start, end=end)
        for rank, start, end in ((0, 2, 6), (1, 4, 6), (1, 8, 10))
    ]
    close(answer(trace), 1.0, "8 s of work within 8 s: from the first start (2) to the last end (10)")
    close(answer([*trace, SimpleNamespace(rank=2, start=2, end=10)]), 2.0, "16 s of work within 8 s, 3 ranks")
    close(answer(trace[::-1]), 1.0, "the same 8 s within 8 s, spans in no order of time")
