"""Algorithms by hand: bitwise equal to the library on integers, and exactly the bytes and messages of the formula."""

import math

import pytest
import torch
from comm_checks import integers

from gpt2lab import kept
from gpt2lab.algorithms import ALL_REDUCE, double_tree, hierarchical, rabenseifner, tree
from gpt2lab.algorithms.doubling import power_below
from gpt2lab.machine import links
from gpt2lab.machine.links import Link
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

LINES = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 1, 2, 3, 4, 5), (0, 2, 5)]
SHAPES = [(1,), (3,), (4, 6), (101,)]


@pytest.fixture(scope="module")
def pool(pools):
    return pools[6]


def axes(rank, world_size):
    if "lines" not in kept:
        mesh = Mesh(dp=world_size)
        kept["lines"] = [a for line in LINES if (a := mesh.axis(f"line {line}", [line])) is not None]
    return kept["lines"]


# --- elements of each message that a rank of n sends, for a tensor of `count`


def ring_sent(n, rank, count):
    """All chunks but the own as partial sums, all but the right neighbour's as sums."""
    sizes = comm.split_sizes(count, n)
    partials = [sizes[(rank - 1 - s) % n] for s in range(n - 1)]
    return partials + [sizes[(rank - s) % n] for s in range(n - 1)]


def double_tree_sent(n, rank, count, chunks=4):
    """In each tree its chunks once up (not from the root) and once down to each child."""
    found = []
    for parents, half in zip(double_tree.trees(n), comm.split_sizes(count, 2), strict=True):
        found += comm.split_sizes(half, chunks) * ((parents[rank] >= 0) + parents.count(rank))
    return found


def doubling_sent(n, rank, count):
    """The whole tensor in every round, once more for or from a surplus rank."""
    power = power_below(n)
    return [count] * (1 if rank >= power else power.bit_length() - 1 + (rank + power < n))


def rabenseifner_sent(n, rank, count):
    """The half given away in each halving round, the half kept in each doubling round."""
    power = power_below(n)
    if rank >= power:
        return [count]
    rounds = rabenseifner.plan(power, rank, count)
    there = [given[1] - given[0] for _, _, given in rounds]
    back = [kept[1] - kept[0] for _, kept, _ in reversed(rounds)]
    return there + back + [count] * (rank + power < n)


def hierarchical_sent(n, rank, count, node=None):
    """Half a ring inside, a whole one between nodes, the other half inside."""
    node = hierarchical.node_size(n, node)
    place, chunk = rank % node, comm.split_sizes(count, node)[rank % node]
    inside = ring_sent(node, place, count)
    return inside[: node - 1] + ring_sent(n // node, rank // node, chunk) + inside[node - 1 :]


SENT = {
    "naive": lambda n, rank, count: [count] * (1 if rank else n - 1),
    "ring": ring_sent,
    "tree": lambda n, rank, count: [count] * ((rank > 0) + len(tree.children(rank, n))),
    "double tree": double_tree_sent,
    "recursive doubling": doubling_sent,
    "rabenseifner": rabenseifner_sent,
    "hierarchical": hierarchical_sent,
}


def try_out(algorithm, sent, axis, shape):
    """Result equal to the library's, input untouched, and what went out equal to the formula."""
    x = integers(*shape, seed=axis.rank)
    before = x.clone()
    expected = comm.all_reduce(x, axis)
    comm.clear_log()
    got = algorithm(x, axis)
    assert torch.equal(got, expected) and got.data_ptr() != x.data_ptr()
    assert torch.equal(x, before)
    messages = [e.bytes for e in comm.log if e.op == "send"]
    formula = [8 * count for count in sent(axis.size, axis.rank, x.numel())]
    assert sorted(messages) == sorted(formula), (messages, formula)
    assert sum(e.messages for e in comm.log) == len(formula)


@pytest.mark.parametrize("name", ALL_REDUCE)
def test_all_reduce_equals_the_librarys_and_sends_what_the_formula_says(pool, name):
    module = ALL_REDUCE[name]

    def work(rank, world_size):
        for axis in axes(rank, world_size):
            for shape in SHAPES:
                try_out(module.all_reduce, SENT[name], axis, shape)

    pool.run(work)


@pytest.mark.parametrize("options", [{"chunks": 1}, {"chunks": 7}], ids=str)
def test_the_double_tree_works_with_any_number_of_chunks(pool, options):
    def work(rank, world_size):
        for axis in axes(rank, world_size):
            algorithm = lambda x, a: double_tree.all_reduce(x, a, **options)
            try_out(algorithm, lambda n, r, c: double_tree_sent(n, r, c, **options), axis, (29,))

    pool.run(work)


@pytest.mark.parametrize("node", [1, 2, 3, 6])
def test_nodes_of_any_size_that_divides(pool, node):
    def work(rank, world_size):
        axis = axes(rank, world_size)[-1 if rank not in (0, 2, 5) else -2]
        assert axis.size == 6
        algorithm = lambda x, a: hierarchical.all_reduce(x, a, node)
        try_out(algorithm, lambda n, r, c: hierarchical_sent(n, r, c, node), axis, (31,))

    pool.run(work)


@pytest.mark.parametrize("n", [*range(1, 40), 100, 1024])
def test_trees_reach_everybody_and_no_rank_has_children_in_both(n):
    both = double_tree.trees(n)
    binomial = [tree.parent(r) if r else -1 for r in range(n)]
    for parents in (*both, binomial):
        assert parents.count(-1) == 1
        depth = 0
        for rank in range(n):
            steps = 0
            while parents[rank] >= 0:
                rank, steps = parents[rank], steps + 1
            depth = max(depth, steps)
        assert depth <= math.ceil(math.log2(n + 1))
    assert sum(len(tree.children(r, n)) for r in range(n)) == n - 1
    assert not {p for p in both[0] if p >= 0} & {p for p in both[1] if p >= 0}
    assert max(parents.count(r) for parents in both for r in range(n)) <= 2


BUSIEST = {  # bytes of the busiest rank over S, as n grows
    "naive": lambda n: n - 1,
    "ring": lambda n: 2 * (n - 1) / n,
    "double tree": lambda n: 2,
    "rabenseifner": lambda n: 2 * (n - 1) / n,
    "recursive doubling": lambda n: math.log2(n),
}


@pytest.mark.parametrize("name", BUSIEST)
def test_formulas_agree_with_the_textbook_for_powers_of_two(name):
    count = 1 << 12
    for n in (2, 4, 8, 64, 256):
        busiest = max(sum(SENT[name](n, r, count)) for r in range(n)) / count
        assert busiest <= BUSIEST[name](n) + 1e-12
        if name != "double tree":
            assert busiest == pytest.approx(BUSIEST[name](n), abs=1e-12)
    rounds = {"recursive doubling": 3, "rabenseifner": 6, "ring": 14}
    if name in rounds:
        assert {len(SENT[name](8, r, count)) for r in range(8)} == {rounds[name]}


def test_alpha_beta_times_follow_the_formulas():
    link = Link(latency=10.0, bandwidth=2.0)
    seconds = {name: links.all_reduce_time(name, 8, 100.0, link) for name in links.ALL_REDUCE}
    assert seconds == {
        "naive": 2 * 7 * (10 + 50),
        "ring": 14 * 10 + 2 * 7 / 8 * 50,
        "tree": 6 * (10 + 50),
        "double tree": 2 * (3 + 3) * (10 + 100 / 4 / 2),  # four chunks behind each other in a tree of depth 3
        "recursive doubling": 3 * (10 + 50),
        "rabenseifner": 6 * 10 + 2 * 7 / 8 * 50,
    }
    assert links.all_reduce_time("ring", 1, 100.0, link) == 0.0
    other = {name: links.longest_path(name, 6, 100.0) for name in ("recursive doubling", "rabenseifner")}
    assert other == {"recursive doubling": (4, 400.0), "rabenseifner": (6, 2 * 3 / 4 * 100 + 200)}
    with pytest.raises(ValueError, match="'rign'.*ring"):
        links.all_reduce_time("rign", 2, 1.0, link)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13, 64])
@pytest.mark.parametrize("chunks", [1, 4, 9])
def test_the_double_trees_steps_are_those_of_a_played_schedule(n, chunks):
    """Up the trees: a piece goes on when both children's have come; a rank takes one piece from each child a step."""
    last = 0
    for parents in double_tree.trees(n):
        leaves_first = sorted(range(n), key=lambda rank: -_depth(parents, rank))
        gone = {rank: [0] * chunks for rank in range(n)}
        for rank in leaves_first:
            children = [c for c in range(n) if parents[c] == rank]
            for piece in range(chunks):
                here = max((gone[c][piece] for c in children), default=0)
                gone[rank][piece] = max(here, gone[rank][piece - 1] if piece else 0) + 1
        root = parents.index(-1)
        last = max(last, *(gone[c][-1] for c in range(n) if parents[c] == root))
    assert 2 * last == links._double_tree(n, 1.0, chunks)[0]


def _depth(parents, rank):
    return 0 if parents[rank] < 0 else 1 + _depth(parents, parents[rank])


def test_the_crossing_point_is_where_both_take_the_same_time():
    link = Link(5e-6, 1e10)
    for n in (4, 8, 64, 1024):
        size = links.crossing(n, link)
        times = [links.all_reduce_time(name, n, size, link) for name in ("tree", "ring")]
        assert times[0] == pytest.approx(times[1], rel=1e-12)
        assert links.all_reduce_time("tree", n, size / 2, link) < links.all_reduce_time(
            "ring", n, size / 2, link
        )
    assert links.crossing(8, link, "rabenseifner", "ring") == math.inf


def test_bus_bandwidth_by_the_definitions_of_nccl_tests():
    assert links.bandwidths("all_reduce", 4, 8e9, 2.0) == (4e9, 6e9)
    assert links.bandwidths("reduce_scatter", 4, 8e9, 2.0) == (4e9, 3e9)
    assert links.bandwidths("all_gather", 2, 8e9, 2.0) == (4e9, 2e9)
    assert links.bandwidths("all_to_all", 4, 8e9, 2.0) == (4e9, 3e9)
    assert links.bandwidths("broadcast", 4, 8e9, 2.0) == links.bandwidths("reduce", 4, 8e9, 2.0) == (4e9, 4e9)


def test_links_between_pairs():
    table = links.Network(Link(2.0, 1.0), inside=Link(1.0, 4.0), node=2, pairs={(0, 3): Link(9.0, 1.0)})
    assert [table.link(0, r).latency for r in (1, 2, 3)] == [1.0, 2.0, 9.0]
    assert table.ring_time((0, 1), 8.0, 1) == 1 + 2
    assert table.ring_time((0, 1, 2, 3), 8.0, 3) == 3 * 2 + 8
    assert table.ring_time((3, 2, 0), 8.0, 1) == 9 + 8  # the edge that closes the ring is the slowest
