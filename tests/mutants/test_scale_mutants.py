"""Bugs in what is simulated at scale: noticed by a closed form, by live ranks' counts, or by the exact clock."""

import math

import numpy as np
import pytest
from planting import planted
from search_cases import ring_all_reduce

from gpt2lab.algorithms import ALL_REDUCE as LIVE
from gpt2lab.machine.links import Link, Network, all_reduce_time
from gpt2lab.planner import failures, scale
from gpt2lab.planner.failures import LongJob, goodput
from gpt2lab.planner.problem import Cluster, Device
from gpt2lab.planner.scale import Fabric, collective

pytestmark = pytest.mark.mutant
LINK = Link(1e-5, 1e9)
FLAT = Fabric(1, 1 << 20, LINK, LINK, LINK)


def times_are_wrong():
    found = [
        math.isclose(collective(name, 8, 3200, FLAT).seconds, all_reduce_time(name, 8, 3200, LINK))
        for name in ("ring", "tree")
    ]
    return not all(found)


def counts_are_wrong():
    return any(
        collective(name, n, 8 * 101, FLAT, itemsize=8).bytes.tolist()
        != [8 * sum(LIVE[name].sent(n, rank, 101)) for rank in range(n)]
        for name in ("ring", "tree", "double tree")
        for n in (5, 8)
    )


def contention_is_wrong():
    inside, between = Link(1e-6, 8e9), Link(1e-5, 1e9)
    exact = ring_all_reduce(range(8), 8000, Cluster(8, Device(1), Network(between, inside, 2))).makespan
    ring = collective("ring", 8, 8000, Fabric(2, 1 << 20, inside, between, between)).seconds
    tapered = Fabric(2, 8, inside, between, between, taper=4.0).links(
        np.arange(16), (np.arange(16) + 8) % 16
    )[1]
    two = FLAT.links(np.array([1, 2]), np.array([0, 0]))[1]
    return not math.isclose(ring, exact) or set(tapered) != {2.5e8} or set(two) != {5e8}


def goodput_is_wrong():
    job = LongJob(100, 300.0, 12.0, 0.05, 0.25, 0.5)  # a failure every 3 hours
    expected = 0.5 / ((3.0 + 0.25) * (math.exp(0.55 / 3.0) - 1))
    seen = [goodput(job, "hot spare", 3000.0, spares=1000, seed=s) for s in range(4)]
    half = goodput(LongJob(2, 200.0, 50.0, 1e-9, 0.0, 0.01), "elastic", 100_000.0)
    return abs(sum(seen) / 4 - expected) > 0.005 or abs(half - 0.8) > 0.03


def interval_is_wrong():
    lost = lambda t: math.exp(0.1 / 3) * (math.exp((t + 0.5) / 3) - 1) / t
    return lost(failures.daly_interval(0.5, 3.0)) > 1.001 * min(lost(0.01 * i) for i in range(1, 900))


def no_latency(links):
    return lambda self, *ends: (0.0, links(self, *ends)[1])


def nobody_shares(links):
    return lambda self, source, target: (
        links(self, source, target)[0],
        np.concatenate([links(self, source[i : i + 1], target[i : i + 1])[1] for i in range(len(source))]),
    )


def machine_is_one_rank_larger(levels):
    return lambda self, source, target: levels(self, source + 1, target + 1)


def one_chunk_more_in_the_first(parts):
    return lambda size, n: parts(size, n) + (np.arange(n) == 0) - (np.arange(n) == n - 1)


def a_step_less(rounds):
    return lambda *given: list(rounds(*given))[:-1]


def nothing_is_lost(kept):
    return lambda job, time, lost: kept(job, time, False)


def an_interval_too_much_is_lost(kept):
    return lambda job, time, lost: max(0.0, kept(job, time, lost) - job.interval * lost)


def youngs_plus_a_save(interval):
    return lambda save, failures: interval(save, failures) + 2 * save


MUTANTS = [
    (scale.Fabric, "links", no_latency, times_are_wrong),
    (scale.Fabric, "links", nobody_shares, contention_is_wrong),
    (scale.Fabric, "levels", machine_is_one_rank_larger, contention_is_wrong),
    (scale, "equal_parts", one_chunk_more_in_the_first, counts_are_wrong),
    (scale, "_half_ring", a_step_less, times_are_wrong),
    (failures, "_kept", nothing_is_lost, goodput_is_wrong),
    (failures, "_kept", an_interval_too_much_is_lost, goodput_is_wrong),
    (failures, "daly_interval", youngs_plus_a_save, interval_is_wrong),
]


@pytest.mark.parametrize("owner, name, make, noticed", MUTANTS, ids=lambda x: getattr(x, "__name__", None))
def test_mutant_is_noticed(owner, name, make, noticed):
    assert not noticed(), "the control: nothing is wrong without the bug"
    with planted(owner, name, make):
        assert noticed()
