"""How groups of ranks lie on machines, and what their sums then take: by hand, with the numbers of A100 machines."""

import pytest

from gpt2lab.machine.links import Link, Network
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan
from gpt2lab.planner.problem import Cluster, Device
from gpt2lab.planner.seconds import Lies, RankOnCluster, groups_on_nodes
from gpt2lab.planner.sends import AxisTraffic
from gpt2lab.planner.share import RankShare

CONFIG = GPT2Config(vocab_size=300, n_positions=32, n_layer=4, n_head=4, n_embd=32)
CARD, NVLINK = Link(10e-6, 25e9), Link(5e-6, 300e9)


def on(plan, node=8, inside=NVLINK, **more) -> RankOnCluster:
    return RankOnCluster(
        Cluster(512, Device(1e12), Network(CARD, inside, node), **more),
        RankShare(Plan.parse(plan), CONFIG, 512, 32),
    )


def seconds(machine, axis, size, op="all_reduce"):
    """Of one sum (or gather, or exchange) of `size` bytes over an axis; what a ring sends of them."""
    n, passes = machine.rings[axis][0], 2 if op == "all_reduce" else 1
    return machine.travel([AxisTraffic(axis, op, passes * (n - 1) / n * size, passes * (n - 1))])[axis]


@pytest.mark.parametrize(
    ("ranks", "distance", "node", "world", "lies"),
    [
        (8, 1, 8, 64, Lies(1, 8, True)),  # tp=8 fills a machine of 8
        (8, 8, 8, 64, Lies(8, 1, True)),  # dp=8 outside of it: one rank in each of 8 machines
        (64, 1, 8, 64, Lies(8, 8, True)),
        (16, 4, 8, 64, Lies(8, 2, True)),  # two ranks in each machine, beside three other groups
        (6, 1, 8, 24, Lies(2, 2, False)),  # ranks 6 to 11: two in machine 0, four in machine 1
        (3, 1, 4, 6, Lies(2, 1, False)),  # dp=2,tp=3 on machines of 4: ranks 3 | 4, 5
        (2, 3, 4, 6, Lies(2, 1, True)),  # its dp: (0, 3) share a machine; (1, 4) and (2, 5) do not
        (4, 1, 1, 4, Lies(4, 1, True)),
        (2, 6, 8, 8, Lies(1, 2, True)),  # the embedding's two ends in pp=4,dp=2: (0, 6) and (1, 7), no (2, 8)
        (2, 6, 4, 8, Lies(2, 1, True)),
    ],
)
def test_how_groups_lie_on_machines(ranks, distance, node, world, lies):
    assert groups_on_nodes(ranks, distance, node, world) == lies


@pytest.mark.parametrize(("plan", "node"), [("dp=4,tp=6", 8), ("dp=2,tp=3", 4)])
def test_a_tensor_group_that_straddles_machines_leaves_them(plan, node):
    machine = on(plan, node)
    assert machine.crosses("tp") and machine.link("tp").bandwidth == CARD.bandwidth
    assert not on(plan, 24).crosses("tp")


@pytest.mark.parametrize(("inside", "bandwidth"), [(300e9, 8 * 25e9), (150e9, 150e9)])
def test_a_ring_over_whole_machines_uses_all_their_cards_or_all_of_nvlink(inside, bandwidth):
    """64 ranks, a gigabyte: each sends 2 (63 / 64) GB in 126 messages."""
    found = seconds(on("dp=64", inside=Link(5e-6, inside)), "dp+cp", 1e9)
    assert found == pytest.approx(2 * 63 / 64 * 1e9 / bandwidth + 126 * 10e-6)


def test_a_group_of_one_rank_in_a_machine_has_one_card():
    """dp=8 outside of tp=8: 2 (7 / 8) GB over 25 GB/s, in 14 messages."""
    assert seconds(on("dp=8,tp=8"), "dp+cp", 1e9) == pytest.approx(2 * 7 / 8 * 1e9 / 25e9 + 14 * 10e-6)


def test_where_latency_counts_level_by_level_is_faster_than_a_ring():
    """A megabyte over 64 ranks: 28 waits, half of them inside, instead of 126, for somewhat more bytes."""
    size, ring = 1e6, 2 * 63 / 64 * 1e6 / 200e9 + 126 * 10e-6
    levels = 2 * (7 / 8 * size / 300e9 + 7 * 5e-6) + 2 * (7 / 8 * size / 8 / 25e9 + 7 * 10e-6)
    assert seconds(on("dp=64"), "dp+cp", size) == pytest.approx(levels) and levels < ring / 5
    assert seconds(on("dp=64"), "dp+cp", size, "all_gather") == pytest.approx(levels / 2)


def test_a_number_is_summed_by_doubling():
    """Six exchanges with ranks 1, 2, 4, ... 32 places on, of 4 bytes each."""
    assert seconds(on("dp=64"), "dp+cp", 4) == pytest.approx(6 * (10e-6 + 4 / 25e9))


def test_of_an_all_to_all_only_what_is_for_other_machines_leaves_its_own():
    """Of the 15 other ranks of 16, 8 are in the other machine."""
    machine = on("dp=16")
    found = machine.travel([AxisTraffic("dp+cp", "all_to_all", 15e9, 15)])["dp+cp"]
    assert found == pytest.approx(8e9 / 25e9 + 15 * 10e-6)
