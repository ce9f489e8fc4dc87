"""Collectives at scale: the same messages as live ranks up to 16, closed forms where there are some, 4,096 ranks."""

import numpy as np
import pytest
import torch
from search_cases import ring_all_reduce

from gpt2lab.algorithms import ALL_REDUCE as LIVE
from gpt2lab.algorithms import hierarchical as live_hierarchical
from gpt2lab.machine.links import Link, Network, all_reduce_time, hierarchical_time
from gpt2lab.planner import scale
from gpt2lab.planner.problem import Cluster, Device
from gpt2lab.planner.scale import Fabric, collective, in_network, slowest_of
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

LINK = Link(1e-5, 1e9)
FLAT = Fabric(1, 1 << 20, LINK, LINK, LINK)
SMALL = Fabric(2, 8, Link(1e-6, 8e9), Link(1e-5, 1e9), Link(3e-5, 1e9))


def pairs(rounds) -> dict[tuple[int, int], list[int]]:
    """Bytes of every message by (sender, receiver)."""
    found = {}
    for source, target, size in rounds:
        for a, b, s in zip(source.tolist(), target.tolist(), size.tolist(), strict=True):
            if s:
                found.setdefault((a, b), []).append(s)
    return {pair: sorted(sizes) for pair, sizes in found.items()}


def live_pairs(rank, world_size, names, counts, node):
    """The same from the log of live ranks, by (name, count)."""
    axis, found = Mesh(dp=world_size)["dp"], {}
    for name in names:
        for count in counts:
            comm.clear_log()
            more = {"node": node} if name == "hierarchical" else {}
            LIVE[name].all_reduce(torch.ones(count, dtype=torch.float64), axis, **more)
            mine = [(target, size) for e in comm.log if e.op == "send" for target, size in e.targets if size]
            found[name, count] = {
                (rank, t): sorted(s for u, s in mine if u == t) for t in {t for t, _ in mine}
            }
    return found


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_the_messages_are_those_of_live_ranks(pools, ranks):
    names = ["ring", "tree", "double tree"] + ["hierarchical"] * (ranks % 2 == 0)
    compare(pools[ranks], ranks, names, (1, 3, 101), 2)


@pytest.mark.slow
def test_the_messages_are_those_of_sixteen_live_ranks(pools):
    compare(pools[16], 16, ["ring", "tree", "double tree", "hierarchical"], (101,), 4)


def compare(pool, ranks, names, counts, node):
    """Every message of the simulation is one of the live ranks, and the other way round."""
    live = pool.run(live_pairs, names, counts, node)
    for name in names:
        for count in counts:
            sent = {pair: sizes for of_rank in live for pair, sizes in of_rank[name, count].items()}
            more = {"machine": node} if name == "hierarchical" else {}
            assert pairs(scale.ALGORITHMS[name](ranks, 8 * count, 8, **more)) == sent, (name, count)


@pytest.mark.parametrize("n", [1, 2, 5, 8, 12, 16])
@pytest.mark.parametrize("name", ["ring", "tree", "double tree"])
def test_counts_are_those_of_the_formulas(name, n):
    found = collective(name, n, 8 * 101, FLAT, itemsize=8)
    formula = [LIVE[name].sent(n, rank, 101) for rank in range(n)]
    assert found.messages.tolist() == [len(sizes) for sizes in formula]
    assert found.bytes.tolist() == [8 * sum(sizes) for sizes in formula]


@pytest.mark.parametrize("n", [2, 4, 16, 64])
@pytest.mark.parametrize("name", ["ring", "tree"])
def test_on_equal_links_times_are_those_of_the_closed_forms(name, n):
    size = 4 * 64 * 1000
    assert collective(name, n, size, FLAT).seconds == pytest.approx(all_reduce_time(name, n, size, LINK))


@pytest.mark.parametrize(("n", "off"), [(7, 1e-9), (15, 1e-9), (16, 0.1), (100, 0.2)])
def test_a_full_double_tree_takes_as_long_as_its_formula_says(n, off):
    formula = all_reduce_time("double tree", n, 8e5, LINK)
    assert collective("double tree", n, 800_000, FLAT).seconds == pytest.approx(formula, rel=off)


@pytest.mark.parametrize(("machines", "machine"), [(4, 2), (2, 8), (8, 8)])
def test_a_hierarchical_sum_takes_as_long_as_its_formula_says(machines, machine):
    n, inside, rail = machines * machine, Link(1e-6, 8e9), Link(1e-5, 1e9)
    fabric = Fabric(machine, n, inside, rail, Link(1, 1))
    found = collective("hierarchical", n, 4 * n * 100, fabric)
    assert found.seconds == pytest.approx(hierarchical_time(n, machine, 4 * n * 100, inside, rail))
    assert found.by_level["spine"] == 0


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_the_exact_clock_with_contention_says_the_same_of_a_ring_over_machines(n):
    """As long as no rank sends two messages at once: here they queue, as in our ring; there they divide the link."""
    inside, between = Link(1e-6, 8e9), Link(1e-5, 1e9)
    exact = ring_all_reduce(range(n), 800 * n, Cluster(n, Device(1), Network(between, inside, 2))).makespan
    found = collective("ring", n, 800 * n, Fabric(2, 1 << 20, inside, between, between))
    assert found.seconds == pytest.approx(exact)


def test_what_shares_a_card_or_an_uplink_is_slower():
    ranks = np.arange(16)
    one = SMALL.links(np.array([0]), np.array([2]))[1][0]
    two = SMALL.links(np.array([0, 0]), np.array([2, 4]))[1].tolist()
    into = SMALL.links(np.array([2, 4]), np.array([0, 0]))[1].tolist()
    assert one == 1e9 and two == into == [5e8, 5e8]
    assert SMALL.links(np.array([0, 0]), np.array([1, 2]))[1].tolist() == [8e9, 1e9]
    tapered = Fabric(2, 8, SMALL.inside, SMALL.rail, SMALL.spine, taper=4.0)
    assert set(tapered.links(ranks, (ranks + 8) % 16)[1]) == {2.5e8}
    assert set(tapered.links(ranks[:2], ranks[8:10])[1]) == {1e9}


def test_levels_are_machine_rail_and_spine():
    pairs_at = {(0, 1): 0, (0, 2): 1, (0, 6): 1, (0, 3): 2, (0, 8): 2, (7, 5): 1}
    source, target = np.array(list(pairs_at)).T
    assert SMALL.levels(source, target).tolist() == list(pairs_at.values())


def test_switches_that_add_halve_what_a_network_card_sends():
    seconds, sent = in_network(64, 2**20, Fabric(8, 64))
    live = live_hierarchical.sent(64, 0, 2**18, 8)
    assert sent == 2**17 and 4 * sum(live[7:-7]) == pytest.approx(2 * 7 / 8 * sent)
    assert seconds < collective("hierarchical", 64, 2**20, Fabric(8, 64)).seconds
    assert in_network(8, 2**20, Fabric())[1] == 0


def test_an_all_to_all_sends_all_but_the_own_part():
    found = collective("all to all", 16, 16 * 400, SMALL)
    assert set(found.messages) == {15} and set(found.bytes) == {15 * 400}


def test_4096_ranks_and_the_hierarchy_wins():
    seconds = {name: collective(name, 4096, 2**28, Fabric()).seconds for name in ("tree", "hierarchical")}
    assert seconds["hierarchical"] < seconds["tree"] / 5


def test_the_slowest_of_n_is_later_the_more_there_are():
    dice = np.random.default_rng(0)
    for n in (1, 8, 256):
        seen = dice.normal(1.0, 0.1, (20_000, n)).max(axis=1).mean()
        assert slowest_of(n, 1.0, 0.1) == pytest.approx(seen, abs=0.003)
