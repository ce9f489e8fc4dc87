"""Bugs planted in comm.py, one at a time on live ranks: the checks that ordinary tests use notice each of them."""

from collections import deque

import pytest
import torch
from comm_checks import CHECKS
from planting import bugs, controls, planting

from gpt2lab import RankFailed
from gpt2lab.ranks import call, comm
from gpt2lab.ranks.call import adjoint
from gpt2lab.ranks.mesh import Mesh


def pair(name, backward, forward=None):
    """A call of comm with another backward, and perhaps another forward, and the checks that notice it."""
    return comm, name, lambda right: adjoint(backward)(forward or right.__wrapped__), name


RIGHT = dict(vars(comm))


def previous_chunk(x, axis, dim=0, sizes=None):
    sizes = list(sizes or comm.split_sizes(x.size(dim), axis.size))
    return x.split(sizes, dim)[axis.rank - 1].contiguous()


def rolled(x, axis, dim=0, sizes=None):
    return RIGHT["all_gather"](x.detach(), axis, dim, sizes).roll(1, dim)


def shift_without_wait(x, axis, by=1, shape=None):
    to, source = (axis.rank + by) % axis.size, (axis.rank - by) % axis.size
    if to == axis.rank:
        return x.clone()
    coming = comm.irecv(torch.zeros(shape or x.shape, dtype=x.dtype), axis, source)
    early = coming._result.zero_().clone()
    going = comm.isend(x, axis, to)
    coming.wait(), going.wait()
    return early


def shift_from_the_wrong_neighbour(x, axis, by=1, shape=None):
    return RIGHT["ring_shift"].__wrapped__(x, axis, 1 if by == 2 and axis.size > 2 else by, shape)


def reversed_parts(parts, axis, shapes=None):
    return RIGHT["all_to_all"]([p.detach() for p in parts], axis, shapes)[::-1]


def gradient_lost(grad, shape, axis, to):
    return torch.zeros_like(comm.irecv(grad.new_empty(shape), axis, to).wait())


def own_chunk_left_out(chunks, rank):
    return sum(chunks) - chunks[rank], len(chunks) - 1


def all_reduced(grad, shape, axis):
    return comm.all_reduce(grad, axis)


def as_it_is(grad, shape, axis):
    return grad


def shift_back(grad, home, axis, by=1, shape=None):
    return comm.ring_shift(grad, axis, -by, home)


def gathered(grad, shape, axis, dim=0, sizes=None):
    return RIGHT["all_gather"](grad, axis, dim, sizes or comm.split_sizes(shape[dim], axis.size))


class Forgetful(deque):
    """A log that keeps nothing."""

    def append(self, event):
        """No-op."""


def ours(grad, shape, axis, dim=0, sizes=None):
    return comm.reduce_scatter(grad, axis, dim, sizes)


BUGS = {
    "copy_to: gradients not reduced": pair("copy_to", as_it_is),
    "copy_to: gradient reduced in place":
        pair("copy_to", lambda grad, shape, axis: comm.all_reduce(grad, axis, own=True)),
    "reduce_from: mean instead of sum":
        pair("reduce_from", as_it_is, lambda x, axis: comm.all_reduce(x.detach(), axis) / axis.size),
    "reduce_from: reduced again in backward": pair("reduce_from", all_reduced),
    "reduce_from: sum written into the input":
        pair("reduce_from", as_it_is, lambda x, axis: comm.all_reduce(x.detach(), axis, own=True).clone()),
    "all_gather: shards joined in the wrong order": pair("all_gather", ours, rolled),
    "all_gather: own slice of the gradient only":
        pair("all_gather", lambda grad, shape, axis, dim=0, sizes=None: comm.scatter_to(grad, axis, dim, sizes)),
    "gather_replicated: gradient counted n times": pair("gather_replicated", ours),
    "scatter_to: the neighbour's chunk": pair("scatter_to", gathered, previous_chunk),
    "scatter_to: gradients joined as if chunks were equal":
        pair("scatter_to", lambda grad, shape, axis, dim=0, sizes=None: comm.all_gather(grad, axis, dim)),
    "broadcast: gradient of the root alone":
        pair("broadcast", lambda grad, shape, axis, root=0: grad * (axis.rank == root)),
    "reduce: every rank gets the sum":
        pair("reduce", lambda grad, shape, axis, root=0: comm.broadcast(grad, axis, root),
             lambda x, axis, root=0: comm.all_reduce(x.detach(), axis)),
    "all_to_all: parts in the wrong order":
        pair("all_to_all", lambda grads, shapes, axis, *_: comm.all_to_all(grads, axis, shapes), reversed_parts),
    "ring_shift: result used before it came": pair("ring_shift", shift_back, shift_without_wait),
    "ring_shift: from the wrong neighbour": pair("ring_shift", shift_back, shift_from_the_wrong_neighbour),
    "send: gradient lost":
        (comm, "send", lambda right: adjoint(gradient_lost, alone=False)(right.__wrapped__), "send and recv"),
    "counter: the wrong chunk left out":
        (call, "RING", lambda right: right | {"all_gather": own_chunk_left_out}, "all_gather"),
    "counter: calls are not logged": (call, "log", lambda right: Forgetful(), "reduce_from"),
}  # fmt: skip


def run(rank, world_size, bug, case):
    """All checks of a case on this rank, with a bug planted or without."""
    axis = Mesh(dp=world_size)["dp"]
    with planting(bug):
        for check in CHECKS:
            check(case, axis)


@bugs(BUGS)
def test_the_checks_notice(pools, bug, check):
    with pytest.raises(RankFailed) as info:
        pools[3].run(run, bug, check)
    assert info.value.ename in ("AssertionError", "Mismatch"), str(info.value)


@controls(BUGS)
def test_without_a_bug_the_same_checks_pass(pools, check):
    pools[3].run(run, None, check)
