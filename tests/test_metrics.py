"""Speed-up, efficiency, Amdahl, Gustafson, Karp-Flatt, overlap and parallelism, on numbers known from elsewhere."""

import random
from types import SimpleNamespace

import pytest

from gpt2lab.planner import metrics


def spans(*triples):
    return [SimpleNamespace(rank=r, start=s, end=e) for r, s, e in triples]


def test_the_published_speedups_follow_from_the_published_minutes():
    openmp, nosv = metrics.speedup(24.1, 0.98), metrics.speedup(24.1, 1.10)
    assert openmp == pytest.approx(24.7, abs=0.15) and nosv == pytest.approx(21.8, abs=0.15)
    assert round(metrics.efficiency(openmp, 112), 2) == 0.22
    assert metrics.efficiency(nosv, 112) == pytest.approx(0.195, abs=1e-3)
    assert metrics.karp_flatt(24.7, 112) == pytest.approx(0.032, abs=5e-4)


@pytest.mark.parametrize("workers", [2, 3, 112])
@pytest.mark.parametrize("fraction", [0.0, 0.03, 0.5, 1.0])
def test_karp_flatt_turns_amdahl_round(fraction, workers):
    assert metrics.karp_flatt(metrics.amdahl(fraction, workers), workers) == pytest.approx(
        fraction, abs=1e-12
    )


def test_amdahl_is_bounded_and_gustafson_is_not():
    assert metrics.amdahl(0.1, 1) == metrics.gustafson(0.1, 1) == pytest.approx(1)
    assert 9.9 < metrics.amdahl(0.1, 1000) < 10 < metrics.gustafson(0.1, 1000) == pytest.approx(900.1)


def test_gustafson_is_amdahl_of_the_grown_problem():
    """The serial part of the time on p workers is a smaller part of the work that one worker would have to do."""
    share, workers = 0.2, 8
    of_the_work = share / (share + (1 - share) * workers)
    assert metrics.gustafson(share, workers) == pytest.approx(metrics.amdahl(of_the_work, workers))


@pytest.mark.parametrize("compute, comm", [(3, 2), (2, 3), (2, 2), (0, 1), (1, 0)])
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_overlap_equals_a_simulation_of_two_lanes(pieces, compute, comm):
    computed = sent = 0
    for _ in range(pieces):
        computed += compute
        sent = max(sent, computed) + comm
    assert metrics.overlapped(pieces, compute, comm) == sent
    assert pieces * max(compute, comm) <= sent <= metrics.sequential(pieces, compute, comm)


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
