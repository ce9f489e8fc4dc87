"""Bugs planted in comm.py, one at a time on live ranks: the checks that ordinary tests use notice each of them."""

import contextlib

import pytest
import torch
from comm_checks import CHECKS

from gpt2lab import RankFailed
from gpt2lab.ranks import call, comm, point_to_point, traffic
from gpt2lab.ranks import collectives as plain
from gpt2lab.ranks.mesh import Mesh


@pytest.fixture
def pool(pools):
    return pools[3]


def pair(forward, backward):
    return comm._pair("mutant", forward, backward, "")


def in_place(grad, axis):
    return plain.all_reduce(grad, axis, own=True)


def mean(x, axis):
    return plain.all_reduce(x.detach(), axis) / axis.size


def previous_chunk(x, axis, dim=0, sizes=None):
    sizes = list(sizes)
    return x.split(sizes, dim)[axis.rank - 1].contiguous()


def padded_to_mine(x, axis, dim, sizes):
    return plain.all_gather(x, axis, dim, sizes).roll(1, dim)


def shift_without_wait(x, axis, by, shape):
    to, source = (axis.rank + by) % axis.size, (axis.rank - by) % axis.size
    if to == axis.rank:
        return x.clone()
    coming = plain.irecv(torch.zeros(shape, dtype=x.dtype), axis, source)
    early = coming._result.zero_().clone()
    going = plain.isend(x, axis, to)
    coming.wait(), going.wait()
    return early


def shift_from_the_wrong_neighbour(x, axis, by, shape):
    return right_shift(x, axis, 1, shape) if by == 2 and axis.size > 2 else right_shift(x, axis, by, shape)


right_shift, right_cost = point_to_point._shift, traffic.all_gather_cost
right_to_all = plain.all_to_all


def reversed_parts(parts, axis, shapes=None, async_op=False):
    return right_to_all(parts, axis, shapes, async_op)[::-1]


def gradient_lost(ctx, grad):
    return torch.zeros_like(point_to_point.irecv(ctx.like, ctx.axis, ctx.to).wait()), None, None


def own_chunk_left_out(chunks, rank):
    return sum(chunks) - chunks[rank], len(chunks) - 1


def sum_everywhere(x, axis, root):
    return plain.all_reduce(x, axis)


def shards(x, axis, dim, sizes):
    return plain.keep_mine(x, axis, dim, sizes)


SUM, SAME = comm._sum, comm._identity
MUTANTS = {  # what is planted: (where, name, bug, which check notices it)
    "copy_to: gradients not reduced": (comm, "copy_to", pair(SAME, SAME), "copy_to"),
    "copy_to: gradient reduced in place": (comm, "copy_to", pair(SAME, in_place), "copy_to"),
    "reduce_from: mean instead of sum": (comm, "reduce_from", pair(mean, SAME), "reduce_from"),
    "reduce_from: reduced again in backward": (comm, "reduce_from", pair(SUM, SUM), "reduce_from"),
    "reduce_from: sum written into the input": (
        comm,
        "reduce_from",
        pair(lambda x, a: plain.all_reduce(x.detach(), a, own=True).clone(), SAME),
        "reduce_from",
    ),
    "all_gather: shards joined in the wrong order": (
        comm,
        "_all_gather",
        pair(padded_to_mine, plain.reduce_scatter),
        "all_gather",
    ),
    "all_gather: own slice of the gradient only": (
        comm,
        "_all_gather",
        pair(plain.all_gather, shards),
        "all_gather",
    ),
    "gather_replicated: gradient counted n times": (
        comm,
        "_gather_replicated",
        pair(plain.all_gather, plain.reduce_scatter),
        "gather_replicated",
    ),
    "scatter_to: the neighbour's chunk": (
        comm,
        "_scatter_to",
        pair(previous_chunk, plain.all_gather),
        "scatter_to",
    ),
    "broadcast: gradient of the root alone": (
        comm,
        "_broadcast_sum",
        pair(comm._broadcast, lambda grad, axis, root: grad * (axis.rank == root)),
        "broadcast",
    ),
    "reduce: every rank gets the sum": (
        comm,
        "_reduce_copy",
        pair(sum_everywhere, comm._broadcast),
        "reduce",
    ),
    "all_to_all: parts in the wrong order": (plain, "all_to_all", reversed_parts, "all_to_all"),
    "ring_shift: result used before it came": (point_to_point, "_shift", shift_without_wait, "ring_shift"),
    "ring_shift: from the wrong neighbour": (
        point_to_point,
        "_shift",
        shift_from_the_wrong_neighbour,
        "ring_shift",
    ),
    "send: gradient lost": (point_to_point._Send, "backward", staticmethod(gradient_lost), "send and recv"),
    "counter: the wrong chunk left out": (traffic, "all_gather_cost", own_chunk_left_out, "all_gather"),
    "counter: calls are not logged": (call.Handle, "_end", lambda self, call: None, "reduce_from"),
}


@contextlib.contextmanager
def planted(where, name, bug):
    """The bug instead of the right thing, inside a rank."""
    right = vars(where)[name]
    setattr(where, name, bug)
    try:
        yield
    finally:
        setattr(where, name, right)


def run(rank, world_size, mutant, case):
    """Plant a bug and run all checks of a case; the bug is looked up by name, so that it is planted in the rank."""
    axis = Mesh(dp=world_size)["dp"]
    import test_comm_mutants

    where, name, bug, _ = test_comm_mutants.MUTANTS[mutant] if mutant else (comm, "copy_to", comm.copy_to, "")
    with planted(where, name, bug):
        for check in CHECKS:
            check(case, axis)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_checks_notice(pool, mutant):
    with pytest.raises(RankFailed) as info:
        pool.run(run, mutant, MUTANTS[mutant][3])
    assert info.value.ename in ("AssertionError", "Mismatch"), str(info.value)


@pytest.mark.parametrize("case", sorted({case for *_, case in MUTANTS.values()}))
def test_without_a_bug_the_same_checks_pass(pool, case):
    pool.run(run, "", case)
