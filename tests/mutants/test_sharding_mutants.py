"""Bugs planted in the sharding algebra: each must show in a value, or in bytes that are not those promised."""

import contextlib

import pytest
from planting import bugs, planting, under
from sharding_cases import CONFIG, graph, image, inputs, matrices, one_product, run_program, serial
from test_sharding import every_change, wrong_changes

from gpt2lab.processes.failure import RankFailed
from gpt2lab.sharding import cost, describe, interpret, partition, products, propagate, reshard, tofu
from gpt2lab.sharding.gpt2 import captured_gpt2
from gpt2lab.sharding.halo import Halo
from gpt2lab.sharding.interpret import Interpreter
from gpt2lab.sharding.layout import Layout
from gpt2lab.sharding.marks import batch, megatron, sequence

LINE = {"x": 2}
SHAPE = (7, 5)
MEGATRON, SEQUENCE = megatron("x"), sequence("x")


def made(marks, of=None):
    of = of or graph()
    return partition.partition(of, propagate.propagate(of, marks, LINE), LINE)


def run_with_bug(rank, world_size, bug, program, given, want):
    """(error, bytes sent, bytes promised) of one rank while a bug is planted there."""
    found = under(bug, run_program)(rank, world_size, program, given, want)
    return found[0], found[1], program.cost({"x": rank})[0]


def noticed(found) -> bool:
    return any(not error <= 1e-6 or sent != promised for error, sent, promised in found)


ON_RANKS = {
    "rows of a table counted from zero":
        (interpret._here, "place = torch", "rows = rows - rows[0]; place = torch", MEGATRON),
    "a look-up of what is elsewhere gives row 0":
        (interpret._here, "rows[place] == index", "place == place", MEGATRON),
    "numbers made from their place start at zero":
        (Interpreter.call, "[box(node.shape, run.output, self.mesh, self.at)]",
         "[tuple(slice(s.stop - s.start) for s in box(node.shape, run.output, self.mesh, self.at))]",
         SEQUENCE),
    "an all-reduce forgotten": (reshard.take_step, "comm.all_reduce(x, axis, step.op)", "x", MEGATRON),
    "a sum forgotten in a reduce-scatter":
        (reshard.take_step, "comm.reduce_scatter(x, axis, dim)",
         "x.split(comm.split_sizes(x.size(dim), axis.size), dim)[axis.rank]", SEQUENCE),
    "a whole value counts on every rank as a term":
        (reshard.take_step, "x if axis.rank == 0 else", "x if True else", MEGATRON),
    "gathered in the wrong order":
        (reshard.take_step, "comm.all_gather(x, axis, dim, lengths)",
         "comm.all_gather(x, axis, dim, lengths).flip(dim)", SEQUENCE),
}  # fmt: skip


@bugs(ON_RANKS)
def test_the_bug_on_a_rank_is_noticed(pools, bug, check):
    assert noticed(pools[2].run(run_with_bug, bug, made(check), inputs(), serial()))


WHEN_CAPTURED = {
    "every function counts as linear":
        (describe._Analysis.flow, "if linear.get(e.kind)", "if linear.get(e.kind) or not label"),
    "a bias is added by every rank":
        (describe._Analysis.flow, '{*below} == {"term"}', '{*below} <= {"term", "whole"}'),
}  # fmt: skip


@pytest.mark.parametrize("name", WHEN_CAPTURED)
def test_the_bug_in_a_description_is_noticed(pools, name):
    with planting(WHEN_CAPTURED[name]):
        program = made(MEGATRON, captured_gpt2(CONFIG, 7, 11))
    assert noticed(pools[2].run(run_with_bug, None, program, inputs(), serial()))


OF_CHANGES = {
    "a gather counts one element too many":
        (cost.step_cost, "all_gather_cost([row * c for", "all_gather_cost([row * c + element for"),
    "an all-to-all counts what stays":
        (cost.step_cost, "else traffic.direct_cost",
         "else lambda chunks, rank: (sum(chunks), len(chunks) - 1)"),
    "a gradient stays partial": (cost.adjoint, "dst.dual, src.dual", "dst, src"),
    "the neighbour's slice": (reshard.take_step, "return x.split(", "return x.flip(dim).split("),
    "own rows as a term at the wrong place":
        (reshard.take_step, "torch.cat(pieces, dim)", "torch.cat(pieces, dim).roll(1, dim)"),
    "an all-to-all joined in the wrong order":
        (reshard.take_step, "axis, shapes), dim)", "axis, shapes), dim).roll(1, dim)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_CHANGES)
def test_the_bug_of_a_change_is_noticed(pools, name):
    """Which a change's own test notices, where the bug is planted here as well as on the ranks."""
    found = pools[2].run(under(OF_CHANGES[name], every_change), LINE)
    with planting(OF_CHANGES[name]):
        assert wrong_changes(found, LINE)


def planned():
    """What a path of a sum sends, what a program sends, and where a mark is: on this process alone."""
    src, mesh = Layout(((), ()), (("x", "sum"), ("y", "sum"))), {"x": 2, "y": 2}
    marks = batch("x") | {"wpe.weight": propagate.Mark("embd:x", 1)}
    return (
        cost.path(src, Layout.whole(2), (8, 8), mesh).total(mesh),
        sorted(
            made(SEQUENCE).changes()
        ),  # where later operands are heard first, the keys' cut wins in attention
        propagate.propagate(graph(), marks, LINE).layouts["wpe.weight"].text(["x"]),
    )


OF_PLANNING = {
    "a path counts no bytes":
        (cost._total, "step_cost(step, shape, layout, mesh, place, 1) for",
         "(0, step_cost(step, shape, layout, mesh, place, 1)[1]) for"),
    "later operands are heard first":
        (propagate, "_proposals", lambda right: lambda *a: [(9 - n, t, d) for n, t, d in right(*a)]),
    "a mark is overwritten":  # in favour of what comes first
        (propagate, "read_layout",
         lambda right: lambda graph, name, *r: Layout.whole(len(graph.nodes[name].shape))),
}  # fmt: skip


@pytest.mark.parametrize("number, name", list(enumerate(OF_PLANNING)))
def test_the_bug_in_planning_is_noticed(number, name):
    right = planned()
    with planting(OF_PLANNING[name]):
        wrong = planned()
    assert right[number] != wrong[number] and right[2] == "RS0"


OF_WINDOWS = {
    "a row of the halo is missing": (Halo.spans, "self.reach - 1", "self.reach - 2"),
    "a halo's gradient does not go back":  # rows for a neighbour are lost
        (Halo.spans, "return (wide, own) if", "return (list(map(overlap, wide, own)), own) if"),
    "windows of the whole image": (Interpreter._windows, "if halo:", "if False:"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_WINDOWS)
def test_the_bug_in_a_halo_is_noticed(pools, name):
    whole, given, want = image(11, (3, 3))
    program = made({"x": "h:x"}, whole)
    assert not noticed(pools[2].run(run_with_bug, None, program, given, want))
    with contextlib.suppress(RankFailed):  # shapes that do not fit are noticed too
        assert noticed(pools[2].run(run_with_bug, OF_WINDOWS[name], program, given, want))


OF_PRODUCTS = {
    "panels of the wrong owner": (products.panels, "tuple((i, slice", "tuple((0, slice"),
    "a layer's term counts as the product":
        (products._Multiply.forward, "comm.reduce_scatter(c, z, 0)", "c.tensor_split(z.size, 0)[z.rank]"),
    "a gradient is not summed over the row":
        (products._Multiply.backward, "comm.reduce(grad @ b.T, y, column)", "grad @ b.T"),
}  # fmt: skip


@pytest.mark.parametrize("name", [None, *OF_PRODUCTS])
def test_the_bug_in_a_product_is_noticed(pools, name):
    job = under(OF_PRODUCTS.get(name), one_product)
    error = max(error for error, _, _ in pools[8].run(job, {"x": 2, "y": 2, "z": 2}, matrices(8, 8, 8)))
    assert error > 1e-6 if name else error < 1e-12


BATCH, MIXED = [("batch",)] * 6, [("batch",), ("heads",), ("ff",), ("heads",), ("ff",), ("batch",)]
OF_CHAINS = {
    "a border costs nothing": (tofu.LinkChain.between, "return _there", "return 0 * _there", MIXED),
    "the tied weight is summed twice": (tofu.LinkChain.tied, "return cost", "return 0", BATCH),
    "half of a link is left out": (
        tofu.bytes_of_all,
        "places(program.mesh))",
        "places(program.mesh)) // 2",
        BATCH,
    ),
}


@bugs(OF_CHAINS)
def test_a_chain_that_miscounts_is_noticed(bug, check):
    """Where all links are cut alike its cost is what the whole program sends; else a border may be cheaper."""
    right = tofu.LinkChain(graph())
    sent = tofu.bytes_of_all(right.program(check, LINE))
    miscounts = lambda cost: cost < sent or (check is BATCH and cost != sent)
    assert not miscounts(right.cost(check, LINE))
    with planting(bug):
        assert miscounts(tofu.LinkChain(graph()).cost(check, LINE))


@pytest.mark.parametrize("marks", [MEGATRON, SEQUENCE, batch("x")], ids=["megatron", "sequence", "batch"])
def test_nothing_is_noticed_without_a_bug(pools, marks):
    assert not noticed(pools[2].run(run_with_bug, None, made(marks), inputs(), serial()))
