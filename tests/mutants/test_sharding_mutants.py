"""Bugs planted in the sharding algebra: each must show in a value, or in bytes that are not those promised."""

import contextlib
import itertools
from dataclasses import replace

import pytest
import torch
from planting import planted
from sharding_cases import CONFIG, graph, image, inputs, matrices, one_product, run_program, serial

from gpt2lab.processes.failure import RankFailed
from gpt2lab.ranks import comm
from gpt2lab.sharding import (
    cost,
    describe,
    halo,
    interpret,
    layout,
    operators,
    partition,
    products,
    propagate,
    reshard,
    tofu,
)
from gpt2lab.sharding.gpt2 import captured_gpt2
from gpt2lab.sharding.layout import Layout
from gpt2lab.sharding.marks import batch, megatron, sequence

LINE = {"x": 2}
SHAPE = (7, 5)


def made(marks, of=None):
    of = of or graph()
    return partition.partition(of, propagate.propagate(of, marks, LINE), LINE)


def run_with_bug(rank, world_size, bug, program, given, want):
    """(error, bytes sent, bytes promised) of one rank while a bug is planted there."""
    if bug is None:
        found = run_program(rank, world_size, program, given, want)
    else:
        with planted(*bug):
            found = run_program(rank, world_size, program, given, want)
    return found[0], found[1], program.cost({"x": rank})[0]


def noticed(found) -> bool:
    return any(not error <= 1e-6 or sent != promised for error, sent, promised in found)


def instead(kind, other):
    """A step of one kind is replaced: `other(right, x, step, *rest)`."""
    return lambda right: (
        lambda x, step, *rest: other(right, x, step, *rest) if step.kind == kind else right(x, step, *rest)
    )


def own_part(right, x, step, at, shape, axes):
    axis = axes[step.axis]
    return x.split(comm.split_sizes(x.size(step.dim), axis.size), step.dim)[axis.rank]


MEGATRON, SEQUENCE = megatron("x"), sequence("x")
ON_RANKS = {
    "rows of a table counted from zero": (
        MEGATRON,
        (interpret, "_here", lambda right: lambda index, first, length: right(index, 0, length)),
    ),
    "a look-up of what is elsewhere gives row 0": (
        MEGATRON,
        (interpret, "_here", lambda right: lambda *a: (torch.ones_like(right(*a)[0]), right(*a)[1])),
    ),
    "numbers made from their place start at zero": (
        SEQUENCE,
        (interpret, "box", lambda right: lambda *a: tuple(slice(0, s.stop - s.start) for s in right(*a))),
    ),
    "an all-reduce forgotten": (
        MEGATRON,
        (reshard, "take_step", instead("all-reduce", lambda right, x, *_: x)),
    ),
    "a sum forgotten in a reduce-scatter": (
        SEQUENCE,
        (reshard, "take_step", instead("reduce-scatter", own_part)),
    ),
    "a whole value counts on every rank as a term": (
        MEGATRON,
        (reshard, "take_step", instead("to-partial", lambda right, x, *_: x)),
    ),
    "gathered in the wrong order": (
        SEQUENCE,
        (
            reshard,
            "take_step",
            instead("all-gather", lambda right, x, step, *r: right(x, step, *r).flip(step.dim)),
        ),
    ),
}


@pytest.mark.parametrize("name", ON_RANKS)
def test_the_bug_on_a_rank_is_noticed(pools, name):
    marks, bug = ON_RANKS[name]
    assert noticed(pools[2].run(run_with_bug, bug, made(marks), inputs(), serial()))


def all_linear(right):
    return lambda self, e, label, terms: right(self, e, label, terms) or (None if label else "term")


def any_term(right):
    """What is alike on all ranks is added by each of them."""

    def flow(self, e, label, terms):
        if e.kind == "add" and {right(self, one, label, terms) for one in e.args} == {"whole", "term"}:
            return "term"
        return right(self, e, label, terms)

    return flow


WHEN_CAPTURED = {
    "every function counts as linear": (MEGATRON, (describe._Analysis, "flow", all_linear)),
    "a bias is added by every rank": (MEGATRON, (describe._Analysis, "flow", any_term)),
}


@pytest.mark.parametrize("name", WHEN_CAPTURED)
def test_the_bug_in_a_description_is_noticed(pools, name):
    marks, bug = WHEN_CAPTURED[name]
    operators.rule.cache_clear()
    try:
        with planted(*bug):
            program = made(marks, captured_gpt2(CONFIG, 7, 11))
    finally:
        operators.rule.cache_clear()
    assert noticed(pools[2].run(run_with_bug, None, program, inputs(), serial()))


def changes(rank, world_size, bug):
    """(error, bytes sent, bytes promised) over all changes between layouts of a line, forward and backward."""
    axes, whole, found = reshard.live_axes(LINE), torch.arange(35.0, dtype=torch.float64).view(SHAPE) + 1, []
    with planted(*bug):
        for src, dst in itertools.product(layout.layouts(2, ["x"]), repeat=2):
            x = reshard.shard(whole, src, axes).requires_grad_()
            comm.clear_log()
            y = reshard.reshard(x, src, dst, SHAPE, axes)
            sent = sum(e.bytes for e in comm.log)
            promised = cost.path(src, dst, SHAPE, LINE).cost(LINE, {"x": rank}, 8)[0]
            y.backward(torch.ones_like(y))
            right = reshard.shard(whole, Layout(dst.cuts), axes)
            total = comm.all_reduce(y.detach(), axes["x"]) if dst.partial else y.detach()
            whole_gradient = bool((x.grad == 1).all())
            same = total.shape == right.shape and torch.equal(total, right)
            found.append((0.0 if same and whole_gradient else 1.0, sent, promised))
    return found


def gather_counts_all(right):
    def step_cost(step, shape, at, mesh, place, element):
        sent, messages = right(step, shape, at, mesh, place, element)
        return (sent + element if step.kind == "all-gather" else sent), messages

    return step_cost


def own_part_counts(right):
    def step_cost(step, shape, at, mesh, place, element):
        sent, messages = right(step, shape, at, mesh, place, element)
        return (sent * mesh[step.axis] if step.kind == "all-to-all" else sent), messages

    return step_cost


OF_CHANGES = {
    "a gather counts one element too many": (cost, "step_cost", gather_counts_all),
    "an all-to-all counts what stays": (cost, "step_cost", own_part_counts),
    "a gradient stays partial": (reshard, "adjoint", lambda right: lambda src, dst: (dst, src)),
    "the neighbour's slice": (
        reshard,
        "take_step",
        instead("slice", lambda right, x, step, *r: right(x.flip(step.dim), step, *r)),
    ),
    "own rows as a term at the wrong place": (
        reshard,
        "take_step",
        instead("pad", lambda right, x, step, *r: right(x, step, *r).roll(1, step.dim)),
    ),
    "an all-to-all joined in the wrong order": (
        reshard,
        "take_step",
        instead("all-to-all", lambda right, x, step, *r: right(x, step, *r).roll(1, step.dim)),
    ),
}


@pytest.mark.parametrize("name", OF_CHANGES)
def test_the_bug_of_a_change_is_noticed(pools, name):
    assert any(noticed(found) for found in pools[2].run(changes, OF_CHANGES[name]))


def test_a_path_that_counts_no_bytes_is_noticed():
    src, dst, mesh = Layout(((), ()), (("x", "sum"), ("y", "sum"))), Layout.whole(2), {"x": 2, "y": 2}
    right = cost.path(src, dst, (8, 8), mesh).total(mesh)
    cost._search.cache_clear()
    with planted(cost, "_total", lambda right: lambda *a: (0, right(*a)[1])):
        wrong = cost.path(src, dst, (8, 8), mesh).total(mesh)
    cost._search.cache_clear()
    assert wrong[0] > right[0]


def test_a_propagation_that_hears_later_operands_first_is_noticed():
    """Then the keys' cut wins in attention, and other things are sent."""
    right = made(SEQUENCE).changes()
    with planted(propagate, "_proposals", lambda right: lambda *a: [(9 - n, t, d) for n, t, d in right(*a)]):
        assert sorted(made(SEQUENCE).changes()) != sorted(right)


def test_a_mark_that_is_overwritten_is_noticed(pools):
    """Propagation that forgets what was marked, in favour of what comes first."""
    marks = batch("x") | {"wpe.weight": propagate.Mark("embd:x", 1)}
    right = propagate.propagate(graph(), marks, LINE)
    assert right.layouts["wpe.weight"].text(["x"]) == "RS0"
    with planted(
        propagate,
        "read_layout",
        lambda right: lambda graph, name, *r: Layout.whole(len(graph.nodes[name].shape)),
    ):
        wrong = propagate.propagate(graph(), marks, LINE)
    assert wrong.layouts != right.layouts


def half_of_the_halo(right):
    def spans(self, mesh):
        have, want = right(self, mesh)
        return have, [
            (first, rows - 1) if r + 1 < len(want) else (first, rows) for r, (first, rows) in enumerate(want)
        ]

    return spans


def keeps_its_own(right):
    """Rows that go back to a neighbour are lost."""

    def spans(self, mesh):
        have, want = right(self, mesh)
        return ([halo.overlap(a, b) for a, b in zip(have, want, strict=True)] if self.back else have), want

    return spans


OF_WINDOWS = {
    "a row of the halo is missing": (halo.Halo, "spans", half_of_the_halo),
    "a halo's gradient does not go back": (halo.Halo, "spans", keeps_its_own),
    "windows of the whole image": (
        interpret.Interpreter,
        "_windows",
        lambda right: lambda self, run, x, shape: right(self, replace(run, halo=None), x, shape),
    ),
}


@pytest.mark.parametrize("name", OF_WINDOWS)
def test_the_bug_in_a_halo_is_noticed(pools, name):
    whole, given, want = image(11, (3, 3))
    program = made({"x": "h:x"}, whole)
    assert not noticed(pools[2].run(run_with_bug, None, program, given, want))
    with contextlib.suppress(RankFailed):  # shapes that do not fit are noticed too
        assert noticed(pools[2].run(run_with_bug, OF_WINDOWS[name], program, given, want))


def multiplied(rank, world_size, bug, mesh, given):
    with planted(*bug) if bug else contextlib.nullcontext():
        return one_product(rank, world_size, mesh, given)


OF_PRODUCTS = {
    "panels of the wrong owner": (
        products,
        "panels",
        lambda right: lambda *a: [((c, left), (0, right_)) for (c, left), (_, right_) in right(*a)],
    ),
    "a layer's term counts as the product": (
        comm,
        "reduce_scatter",
        lambda right: lambda x, axis, dim: x.tensor_split(axis.size, dim)[axis.rank],
    ),
    "a gradient is not summed over the row": (comm, "reduce", lambda right: lambda x, axis, root: x),
}


@pytest.mark.parametrize("name", OF_PRODUCTS)
def test_the_bug_in_a_product_is_noticed(pools, name):
    mesh, given = {"x": 2, "y": 2, "z": 2}, matrices(8, 8, 8)
    assert max(error for error, _, _ in pools[8].run(multiplied, None, mesh, given)) < 1e-12
    assert max(error for error, _, _ in pools[8].run(multiplied, OF_PRODUCTS[name], mesh, given)) > 1e-6


BATCH, MIXED = [("batch",)] * 6, [("batch",), ("heads",), ("ff",), ("heads",), ("ff",), ("batch",)]
OF_CHAINS = {
    "a border costs nothing": (MIXED, (tofu.LinkChain, "between", lambda right: lambda *a: 0)),
    "the tied weight is summed twice": (BATCH, (tofu.LinkChain, "tied", lambda right: lambda *a: 0)),
    "half of a link is left out": (
        BATCH,
        (tofu, "bytes_of_all", lambda right: lambda program: right(program) // 2),
    ),
}


@pytest.mark.parametrize("name", OF_CHAINS)
def test_a_chain_that_miscounts_is_noticed(name):
    """Where all links are cut alike its cost is what the whole program sends; else a border may be cheaper."""
    choices, bug = OF_CHAINS[name]
    right = tofu.LinkChain(graph())
    sent = tofu.bytes_of_all(right.program(choices, LINE))
    miscounts = lambda cost: cost < sent or (choices is BATCH and cost != sent)
    assert not miscounts(right.cost(choices, LINE))
    with planted(*bug):
        assert miscounts(tofu.LinkChain(graph()).cost(choices, LINE))


def test_nothing_is_noticed_without_a_bug(pools):
    for marks in (MEGATRON, SEQUENCE, batch("x")):
        assert not noticed(pools[2].run(run_with_bug, None, made(marks), inputs(), serial()))
    assert sum(map(len, (ON_RANKS, WHEN_CAPTURED, OF_CHANGES, OF_WINDOWS, OF_PRODUCTS, OF_CHAINS))) + 3 >= 12
