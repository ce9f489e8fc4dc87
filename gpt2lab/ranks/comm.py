"""Every byte between ranks passes through here: counted, logged, out of place, with both directions written out.

Differentiable calls come in adjoint pairs, built below from the plain calls of `collectives.py`. On an axis of size 1
each is the identity. What carries the bytes (shared memory, gloo, NCCL) was chosen by name at launch. Calls with a
backward block; those without one, in `collectives.py` and `point_to_point.py` (`shift`), can overlap with other work.

S is the number of bytes of the whole tensor, c_r those of rank r's chunk (sizes as `tensor_split` gives them). Each
call counts what this rank sends in the bandwidth-optimal algorithm (a ring), in exact integers.
"""

from collections.abc import Sequence

import torch

from ..machine.arguments import checked
from ..processes.status_board import Mismatch
from . import collectives as plain
from .call import Handle, explained
from .collectives import all_reduce, barrier, gather_flat, gather_objects, irecv, isend, reduce_scatter_flat
from .mesh import Axis
from .point_to_point import recv, ring_shift, send
from .traffic import Event, clear_log, log, traffic
from .traffic import split_sizes as lengths

__all__ = [
    "Event",
    "Handle",
    "Mismatch",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "clear_log",
    "copy_to",
    "gather",
    "gather_flat",
    "gather_objects",
    "gather_replicated",
    "irecv",
    "isend",
    "log",
    "recv",
    "reduce",
    "reduce_from",
    "reduce_scatter",
    "reduce_scatter_flat",
    "ring_shift",
    "scatter",
    "scatter_to",
    "send",
    "split_sizes",
    "traffic",
]


split_sizes = checked(total=0, parts=(1, 10**6))(lengths)


def _identity(x, axis):
    return x.view_as(x)


def _sum(x, axis):
    return all_reduce(x.detach(), axis)


def _broadcast(x, axis, root):
    return plain.broadcast(x, axis, root)


def _reduce(x, axis, root):
    """The sum on the root, zeros elsewhere."""
    total = plain.reduce(x, axis, root)
    return total if axis.rank == root else total.zero_()


def _scatter(x, axis, dim, root, sizes):
    return plain.scatter(x, axis, dim, root, sizes)


def _gather(x, axis, dim, root, sizes):
    return plain.gather(x, axis, dim, root, sizes)


def _scatter_back(grad, axis, dim, root, sizes):
    """Adjoint of scatter: the root gathers; the other ranks' input has no influence, so its gradient is zero."""
    whole = _gather(grad, axis, dim, root, sizes)
    shape = list(grad.shape)
    shape[dim] = sum(sizes)
    return whole if axis.rank == root else grad.new_zeros(shape)


def _gather_back(grad, axis, dim, root, sizes):
    """Adjoint of gather: the root scatters its gradient; the other ranks' outputs are empty."""
    shape = list(grad.shape)
    shape[dim] = sum(sizes)
    return _scatter(grad if axis.rank == root else grad.new_empty(shape), axis, dim, root, sizes)


def _pair(name, forward, backward, doc):
    """A differentiable call f(x, axis, *options) whose backward is `backward(grad, axis, *options)`."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, axis, *options):
            ctx.axis, ctx.options = axis, options
            return forward(x, axis, *options)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, ctx.axis, *ctx.options), None, *(None for _ in ctx.options)

    def call(x, axis, *options):
        return x if axis.size == 1 else Pair.apply(x, axis, *options)

    call.__name__, call.__doc__ = name, doc
    return explained(call)


copy_to = _pair("copy_to", _identity, _sum, "Forward: identity. Backward: all-reduce (Megatron's f).")
reduce_from = _pair("reduce_from", _sum, _identity, "Forward: all-reduce. Backward: identity (Megatron's g).")
_all_gather = _pair("all_gather", plain.all_gather, plain.reduce_scatter, "")
_gather_replicated = _pair("gather_replicated", plain.all_gather, plain.keep_mine, "")
_reduce_scatter = _pair("reduce_scatter", plain.reduce_scatter, plain.all_gather, "")
_scatter_to = _pair("scatter_to", plain.keep_mine, plain.all_gather, "")
_broadcast_sum = _pair("broadcast", _broadcast, _reduce, "")
_reduce_copy = _pair("reduce", _reduce, _broadcast, "")
_scatter_gather = _pair("scatter", _scatter, _scatter_back, "")
_gather_scatter = _pair("gather", _gather, _gather_back, "")


@explained
def all_gather(x, axis: Axis, dim: int = 0, sizes: Sequence[int] | None = None):
    """All ranks' shards joined along dim (`sizes`: their lengths, where they differ).

    Backward: reduce-scatter, because every rank uses the result differently. Bytes: S - c_(r+1).
    """
    return _all_gather(x, axis, dim, sizes or [x.size(dim)] * axis.size)


@explained
def gather_replicated(x, axis: Axis, dim: int = 0, sizes: Sequence[int] | None = None):
    """All ranks' shards joined along dim, for a result that all ranks use identically.

    Backward: each rank keeps its own slice. Bytes: S - c_(r+1) forward, none backward.
    """
    return _gather_replicated(x, axis, dim, sizes or [x.size(dim)] * axis.size)


@explained
def reduce_scatter(x, axis: Axis, dim: int = 0, sizes: Sequence[int] | None = None):
    """The sum over the axis, of which each rank keeps its chunk along dim. Backward: all-gather. Bytes: S - c_r."""
    return _reduce_scatter(x, axis, dim, sizes or lengths(x.size(dim), axis.size))


@explained
def scatter_to(x, axis: Axis, dim: int = 0, sizes: Sequence[int] | None = None):
    """This rank's chunk along dim of a tensor that is equal on all ranks. Backward: all-gather."""
    return _scatter_to(x, axis, dim, sizes or lengths(x.size(dim), axis.size))


@explained
def broadcast(x, axis: Axis, root: int = 0):
    """The root's tensor on every rank; the others' x gives shape and dtype. Backward: reduce to the root. Bytes: S."""
    return _broadcast_sum(x, axis, root)


@explained
def reduce(x, axis: Axis, root: int = 0):
    """The sum over the axis on the rank at position `root`, zeros elsewhere. Backward: broadcast. Bytes: S."""
    return _reduce_copy(x, axis, root)


@explained
def scatter(x, axis: Axis, dim: int = 0, root: int = 0, sizes: Sequence[int] | None = None):
    """The root's tensor cut along dim, a chunk per rank; the others' x gives shape and dtype. Backward: gather.

    Bytes: the root S - c_root, the others none.
    """
    return _scatter_gather(x, axis, dim, root, sizes or lengths(x.size(dim), axis.size))


@explained
def gather(x, axis: Axis, dim: int = 0, root: int = 0, sizes: Sequence[int] | None = None):
    """All ranks' shards joined along dim on the root; the others get length 0 along dim. Backward: scatter.

    Bytes: c_r, the root none.
    """
    return _gather_scatter(x, axis, dim, root, sizes or [x.size(dim)] * axis.size)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, axis, shapes, *parts):
        ctx.axis, ctx.shapes = axis, [tuple(p.shape) for p in parts]
        return tuple(plain.all_to_all(parts, axis, shapes))

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *plain.all_to_all(grads, ctx.axis, ctx.shapes)


@explained
def all_to_all(parts: Sequence[torch.Tensor], axis: Axis, shapes: Sequence | None = None) -> list:
    """Part p goes to the rank at position p; returns the parts that arrive, of `shapes` (default: those sent).

    Backward: each gradient goes back to the part's rank. Bytes: the parts that leave, S - c_r.
    """
    return list(parts) if axis.size == 1 else list(_AllToAll.apply(axis, shapes, *parts))
