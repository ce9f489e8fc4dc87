"""The stopwatch: what runs in which order, what is left out, how clocks of ranks are joined; no test asserts a time."""

from gpt2lab.machine import timing
from gpt2lab.machine.speed import copy_rate
from gpt2lab.machine.timing import Times, alone, together, trials


def test_the_clock_runs_from_ready_to_finish(monkeypatch):
    said = []
    clock = lambda: said.append("clock") or len(said)
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    note = lambda word: lambda: said.append(word)
    found = trials(note("call"), count=2, warmup=0, ready=note("ready"), finish=note("finish"))
    assert said == ["finish", "ready", "clock", "call", "finish", "clock"] * 2
    assert found == [(3, 6), (9, 12)]


def test_warm_up_is_run_and_not_kept():
    calls = []
    assert len(trials(lambda: calls.append(1), count=3, warmup=2)) == 3 and len(calls) == 5


def test_one_slow_trial_moves_neither_median_nor_quartiles():
    calm, disturbed = Times((1.0, 1.0, 1.0, 1.0, 1.0)), Times((1.0, 1.0, 1.0, 1.0, 99.0))
    assert (calm.low, calm.median, calm.high) == (disturbed.low, disturbed.median, disturbed.high)


def test_one_trial_is_its_own_spread():
    times = alone([(1.0, 1.5)])
    assert times.low == times.median == times.high == 0.5
    assert str(times) == "500.00 ms (quartiles 500.00 to 500.00, 1 trials)"


def test_ranks_are_timed_from_the_last_arrival_to_the_last_end():
    early, late = [(0.0, 5.5), (10.0, 11.5)], [(5.0, 6.0), (10.5, 11.0)]
    assert together([early, late]).trials == (1.0, 1.0)


def test_a_copy_has_a_rate():
    assert copy_rate(1 << 12, seconds=0.001) > 0
