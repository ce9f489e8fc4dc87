"""The stopwatch, the digest of a tensor, and numbers made of times: speed-up, overlap, parallelism."""

import random
from types import SimpleNamespace

import pytest
import torch

from gpt2lab.machine import timing
from gpt2lab.machine.checksum import summ
from gpt2lab.machine.speed import copy_rate
from gpt2lab.machine.timing import Times, alone, together, trials
from gpt2lab.planner import metrics


def test_the_clock_runs_from_ready_to_finish(monkeypatch):
    said = []
    clock = lambda: said.append("clock") or len(said)
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    note = lambda word: lambda: said.append(word)
    monkeypatch.setattr(timing, "finish_devices", note("finish"))
    found = trials(note("call"), count=2, warmup=0, ready=note("ready"))
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


# --- the digest of a tensor


def test_shape_first_value_and_checksum_are_shown():
    assert summ(torch.full((128, 4), 0.5)).startswith("128x4[0.5...] ")
    assert summ(torch.tensor(3.0)).startswith("scalar[3...] ") and summ(torch.zeros(2, 0)).startswith(
        "2x0[] "
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_any_changed_element_changes_the_checksum(dtype):
    x = torch.arange(24).reshape(4, 6).to(dtype)
    seen = {summ(x)}
    for i in range(x.numel()):
        y = x.clone()
        y.view(-1)[i] += 1
        seen.add(summ(y)[-6:])
    assert len(seen) == x.numel() + 1 and summ(x.clone()) == summ(x)


def test_the_last_bit_the_shape_and_the_type_count():
    x = torch.ones(6, dtype=torch.float64)
    near = x.clone()
    near[5] = torch.nextafter(near[5], torch.tensor(2.0, dtype=torch.float64))
    assert len({summ(t)[-6:] for t in (x, near, x.view(2, 3), x.float(), -x, x * 0, x * -0.0)}) == 7


def test_strides_and_gradients_do_not_count():
    x = torch.arange(6.0).reshape(2, 3)
    assert summ(x.t().contiguous().t()) == summ(x.requires_grad_()) == summ(x.detach())


# --- speed-up, efficiency, overlap and parallelism


def spans(*triples):
    return [SimpleNamespace(rank=r, start=s, end=e) for r, s, e in triples]


def test_the_published_speedups_follow_from_the_published_minutes():
    openmp, nosv = metrics.speedup(24.1, 0.98), metrics.speedup(24.1, 1.10)
    assert openmp == pytest.approx(24.7, abs=0.15) and nosv == pytest.approx(21.8, abs=0.15)
    assert round(metrics.efficiency(openmp, 112), 2) == 0.22
    assert metrics.efficiency(nosv, 112) == pytest.approx(0.195, abs=1e-3)
    assert metrics.karp_flatt(24.7, 112) == pytest.approx(0.032, abs=5e-4)


def test_parallelism_is_busy_time_over_makespan():
    trace = spans((0, 0, 4), (1, 2, 4), (1, 6, 8))
    assert metrics.average_parallelism(trace) == (4 + 2 + 2) / 8
    assert metrics.profile(trace) == [(0, 1), (2, 2), (4, 0), (6, 1), (8, 0)]


def test_nested_and_touching_spans_count_once():
    trace = spans((0, 0, 4), (0, 1, 2), (0, 4, 5))
    assert metrics.busy(trace) == {0: [(0, 5)]} and metrics.average_parallelism(trace) == 1


def test_the_area_under_the_profile_is_the_busy_time():
    draw = random.Random(0)
    starts = [(draw.randrange(4), draw.randrange(100)) for _ in range(60)]
    trace = spans(*((rank, start, start + draw.randrange(1, 9)) for rank, start in starts))
    steps = metrics.profile(trace)
    area = sum(n * (later - time) for (time, n), (later, _) in zip(steps, steps[1:], strict=False))
    stretches = [s for of_one in metrics.busy(trace).values() for s in of_one]
    assert area == sum(end - start for start, end in stretches)
    assert area / (steps[-1][0] - steps[0][0]) == pytest.approx(metrics.average_parallelism(trace))


def test_intersection_is_the_time_that_both_have_in_common():
    work, comm = spans((0, 0, 2), (0, 3, 5)), spans((0, 1, 4), (0, 2, 3.5))
    assert metrics.intersection(work, comm) == 1 + 1
    assert metrics.intersection(work, spans((0, 2, 3))) == 0
