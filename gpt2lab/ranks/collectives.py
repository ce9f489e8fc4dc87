"""The calls without autograd: the only file that names torch.distributed's collectives.

All are out of place (the one exception: `own=True`, for a caller that gives its buffer away). `root`, `to` and
`source` are positions along the axis. With `async_op=True` a call returns a Handle whose `wait()` gives the result.
"""

import pickle
from collections.abc import Sequence

import torch
import torch.distributed as dist

from . import paced, traffic
from .buffers import byte_size, byte_sizes, fresh, no_graph, padded, ranked, unranked
from .call import Call, Done, explained, finished, perform, shape_and_dtype
from .mesh import Axis
from .traffic import split_sizes

Sizes = Sequence[int] | None
REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@explained
def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum", async_op: bool = False, own: bool = False):
    """The sum (max, min) over the axis, on every rank.

    With `own` the result replaces x, which must be contiguous. A NaN on any rank gives a NaN on every rank, also in a
    max or min, where a backend alone could lose it. Bytes per rank: reduce-scatter plus all-gather, 2 (n-1)/n S
    (Patarasuk & Yuan 2009); a max or min of 16-bit floats is sent as 32 bits.
    """
    no_graph("all_reduce", x)
    if op not in REDUCE:
        raise ValueError(f"all_reduce: op={op!r} is not one of sum, max, min.")
    if own and not x.is_contiguous():
        raise ValueError(f"all_reduce: own=True needs a contiguous buffer, got strides {x.stride()}.")
    if axis.size == 1:
        return finished(x, async_op)
    compared = op != "sum" and x.is_floating_point()
    result = ranked(x, op) if compared else x.detach() if own else fresh(x)
    back = lambda found: x.detach().copy_(unranked(found, x.dtype)) if own else unranked(found, x.dtype)
    chunks = [c * result.element_size() for c in split_sizes(x.numel(), axis.size)]
    cost = traffic.all_reduce_cost(chunks, axis.rank)
    call = Call.ring("all_reduce", axis, f"{op} {shape_and_dtype(x)}", cost)
    start = lambda async_op: dist.all_reduce(result, REDUCE[op], group=axis.group, async_op=async_op)
    return perform(call, start, result, async_op, back if compared else None)


@explained
def gather_flat(shard: torch.Tensor, axis: Axis, async_op: bool = False, out: torch.Tensor | None = None):
    """All ranks' shards (s,) of equal length as one (n s,). Bytes per rank: (n-1)/n S."""
    if axis.size == 1:
        return finished(shard.detach() if out is None else out.copy_(shard), async_op)
    out = shard.new_empty(axis.size * shard.numel()) if out is None else out
    cost = traffic.all_gather_cost([byte_size(shard)] * axis.size, axis.rank)
    call = Call.ring("all_gather", axis, f"flat {shape_and_dtype(shard)}", cost)
    mine = shard.detach().contiguous()
    start = lambda async_op: dist.all_gather_single(out, mine, group=axis.group, async_op=async_op)
    return perform(call, start, out, async_op)


@explained
def reduce_scatter_flat(x: torch.Tensor, axis: Axis, async_op: bool = False, what: str = "flat"):
    """The sum over the axis of x (n s,); each rank gets its (s,). `what` names x in errors. Bytes: (n-1)/n S."""
    if axis.size == 1:
        return finished(x.detach(), async_op)
    if x.dim() != 1 or x.numel() % axis.size:
        raise ValueError(
            f"reduce_scatter_flat: {tuple(x.shape)} must be (n,) with n a multiple of {axis.size} ranks."
        )
    out, whole = x.new_empty(x.numel() // axis.size), x.detach().contiguous()
    cost = traffic.reduce_scatter_cost([byte_size(out)] * axis.size, axis.rank)
    call = Call.ring("reduce_scatter", axis, f"{what} {shape_and_dtype(x)}", cost)
    start = lambda async_op: dist.reduce_scatter_single(out, whole, group=axis.group, async_op=async_op)
    return perform(call, start, out, async_op)


def all_gather(x, axis: Axis, dim: int = 0, sizes: Sizes = None, async_op: bool = False):
    """All ranks' shards joined along dim; `sizes` are their lengths where they differ. Bytes: S - c_(r+1)."""
    if axis.size == 1:
        return finished(x, async_op)
    sizes = _shards("all_gather", x, axis, dim, sizes)
    mine = padded(x.detach().movedim(dim, 0), max(sizes))
    parts = [torch.empty_like(mine) for _ in sizes]
    cost = traffic.all_gather_cost(byte_sizes(x, sizes, dim), axis.rank)
    call = Call.ring("all_gather", axis, f"dim {dim} sizes {sizes} of {shape_and_dtype(mine)}", cost)
    start = lambda async_op: dist.all_gather(parts, mine, group=axis.group, async_op=async_op)
    join = lambda parts: torch.cat([p[:s] for p, s in zip(parts, sizes, strict=True)]).movedim(0, dim)
    return perform(call, start, parts, async_op, join)


def reduce_scatter(x, axis: Axis, dim: int = 0, sizes: Sizes = None, async_op: bool = False):
    """The sum over the axis, of which each rank keeps its chunk along dim. Bytes per rank: S - c_r."""
    if axis.size == 1:
        return finished(x, async_op)
    sizes = _chunks("reduce_scatter", x, axis, dim, sizes)
    parts = [p.contiguous() for p in x.detach().movedim(dim, 0).split(sizes)]
    result = torch.empty_like(parts[axis.rank])
    cost = traffic.reduce_scatter_cost(byte_sizes(x, sizes, dim), axis.rank)
    call = Call.ring("reduce_scatter", axis, f"dim {dim} sizes {sizes} of {shape_and_dtype(x)}", cost)
    start = lambda async_op: dist.reduce_scatter(result, parts, group=axis.group, async_op=async_op)
    return perform(call, start, result, async_op, lambda result: result.movedim(0, dim))


def keep_mine(x, axis: Axis, dim: int = 0, sizes: Sizes = None):
    """This rank's chunk of a tensor that every rank has. No bytes."""
    if axis.size == 1:
        return x
    return x.split(_chunks("scatter_to", x, axis, dim, sizes), dim)[axis.rank].contiguous()


def _shards(op: str, x, axis: Axis, dim: int, sizes: Sizes) -> list[int]:
    """The lengths of the ranks' shards along dim; ValueError if they are not one per rank, of which x has mine."""
    sizes = list(sizes or [x.size(dim)] * axis.size)
    if len(sizes) != axis.size or sizes[axis.rank] != x.size(dim):
        here = f"rank {axis.rank} of {axis.size} holds {x.size(dim)}"
        raise ValueError(f"{op}: {here} along dim {dim}, but sizes={sizes}.")
    return sizes


def _chunks(op: str, x, axis: Axis, dim: int, sizes: Sizes) -> list[int]:
    """The lengths of the ranks' chunks of x along dim; ValueError if they do not fill it."""
    sizes = list(sizes or split_sizes(x.size(dim), axis.size))
    if len(sizes) != axis.size or sum(sizes) != x.size(dim):
        parts = f"{axis.size} parts, one per rank"
        raise ValueError(f"{op}: sizes={sizes} do not cut length {x.size(dim)} into {parts}.")
    return sizes


def broadcast(x: torch.Tensor, axis: Axis, root: int = 0, async_op: bool = False):
    """The root's tensor on every rank; the other ranks' x gives shape and dtype.

    Bytes per rank: S, along a chain that starts at the root; its last rank sends none.
    """
    if axis.size == 1:
        return finished(x, async_op)
    result, size = fresh(x), byte_size(x)
    cost = traffic.chain_cost(size, axis.rank == (root - 1) % axis.size)
    call = Call.ring("broadcast", axis, f"root {root} {shape_and_dtype(x)}", cost, (size, axis.size - 1))
    start = lambda async_op: dist.broadcast(result, axis.ranks[root], group=axis.group, async_op=async_op)
    return perform(call, start, result, async_op)


def reduce(x: torch.Tensor, axis: Axis, root: int = 0, async_op: bool = False):
    """The sum over the axis on the rank at position `root`; the result on the others has no meaning.

    Bytes per rank: S, along a chain that ends at the root; the root sends none.
    """
    if axis.size == 1:
        return finished(x, async_op)
    result, size = fresh(x), byte_size(x)
    cost = traffic.chain_cost(size, axis.rank == root)
    call = Call.ring("reduce", axis, f"root {root} {shape_and_dtype(x)}", cost, (size, axis.size - 1))
    start = lambda async_op: dist.reduce(result, axis.ranks[root], group=axis.group, async_op=async_op)
    return perform(call, start, result, async_op)


def scatter(x, axis: Axis, dim: int = 0, root: int = 0, sizes: Sizes = None, async_op: bool = False):
    """The root's tensor cut along dim, a chunk per rank; the others' x gives the shape. Bytes: root S - c_root."""
    if axis.size == 1:
        return finished(x, async_op)
    sizes = _chunks("scatter", x, axis, dim, sizes)
    like = x.detach().movedim(dim, 0)
    chunk = like.new_empty(max(sizes), *like.shape[1:])
    mine = axis.rank == root
    chunks = byte_sizes(x, sizes, dim)
    parts = [padded(p, max(sizes)) for p in like.split(sizes)] if mine else None
    detail = f"root {root} dim {dim} sizes {sizes} of {shape_and_dtype(x)}"
    sends = traffic.direct_sends(chunks, axis) if mine else ()
    call = Call.direct("scatter", axis, detail, sends, traffic.direct_cost(chunks, root))
    start = lambda async_op: dist.scatter(chunk, parts, axis.ranks[root], group=axis.group, async_op=async_op)
    return perform(call, start, chunk, async_op, lambda chunk: chunk[: sizes[axis.rank]].movedim(0, dim))


def gather(x, axis: Axis, dim: int = 0, root: int = 0, sizes: Sizes = None, async_op: bool = False):
    """All ranks' shards joined along dim on the rank at position `root`; the others get length 0 along dim.

    Bytes per rank: its own shard; the root sends none.
    """
    if axis.size == 1:
        return finished(x, async_op)
    sizes = _shards("gather", x, axis, dim, sizes)
    mine = padded(x.detach().movedim(dim, 0), max(sizes))
    parts = [torch.empty_like(mine) for _ in sizes] if axis.rank == root else None
    chunks = byte_sizes(x, sizes, dim)
    detail = f"root {root} dim {dim} sizes {sizes} of {shape_and_dtype(mine)}"
    sends = () if axis.rank == root else ((axis.ranks[root], chunks[axis.rank]),)
    call = Call.direct("gather", axis, detail, sends, traffic.direct_cost(chunks, root))
    start = lambda async_op: dist.gather(mine, parts, axis.ranks[root], group=axis.group, async_op=async_op)
    join = lambda parts: torch.cat([p[:s] for p, s in zip(parts, sizes, strict=True)]).movedim(0, dim)
    return perform(
        call, start, parts or mine, async_op, join if parts else lambda _: x.detach().narrow(dim, 0, 0)
    )


def all_to_all(
    parts: Sequence[torch.Tensor], axis: Axis, shapes: Sequence | None = None, async_op: bool = False
):
    """Part p goes to the rank at position p; returns the parts that arrive, of `shapes` (default: those sent).

    Bytes per rank: the parts that leave it; an empty part is no message.
    """
    if axis.size == 1:
        return finished(list(parts), async_op)
    shapes = [tuple(s) for s in (shapes or [p.shape for p in parts])]
    if not len(parts) == len(shapes) == axis.size:
        raise ValueError(f"all_to_all: {len(parts)} parts for {axis.size} ranks. Pass one part per rank.")
    if len(types := {str(p.dtype) for p in parts}) > 1:
        raise ValueError(
            f"all_to_all: the parts are of {' and '.join(sorted(types))}. Pass parts of one type."
        )
    going, coming = [p.numel() for p in parts], [torch.Size(s).numel() for s in shapes]
    flat = torch.cat([p.detach().reshape(-1) for p in parts])
    result = flat.new_empty(sum(coming))
    sent = [n * flat.element_size() for n in going]
    counts = [",".join(map(str, numbers)) for numbers in (going, coming)]
    detail = " ".join([str(flat.dtype).removeprefix("torch."), *counts])
    call = Call.direct("all_to_all", axis, detail, traffic.direct_sends(sent, axis))
    start = lambda async_op: dist.all_to_all_single(
        result, flat, coming, going, group=axis.group, async_op=async_op
    )
    cut = lambda flat: [p.view(s) for p, s in zip(flat.split(coming), shapes, strict=True)]
    return perform(call, start, result, async_op, cut)


@explained
def barrier(axis: Axis, async_op: bool = False):
    """Return when every rank of the axis has arrived."""
    if axis.size == 1:
        return finished(None, async_op)
    call = Call.ring("barrier", axis, "", (0, 0), (0, axis.size - 1))
    return perform(call, lambda async_op: dist.barrier(group=axis.group, async_op=async_op), None, async_op)


@explained
def gather_objects(value, axis: Axis, aside: bool = False) -> list:
    """Every rank's value (picklable), as a list on every rank. For small things: reports, shapes, states.

    `aside`: from a thread beside the one that makes the calls, over a group of its own; neither announced nor logged.
    """
    if axis.size == 1:
        return [value]
    values, others = [None] * axis.size, axis.size - 1
    if aside:
        dist.all_gather_object(values, value, group=axis.group)
        return values
    size = others * len(pickle.dumps(value))
    call = Call.ring("gather_objects", axis, "", (size, others))
    perform(call, lambda _: Done(dist.all_gather_object(values, value, group=axis.group)), None)
    return values


@explained
def isend(x: torch.Tensor, axis: Axis, to: int):
    """Start sending x to the rank at position `to`; returns a Handle. Do not change x before `wait`. Bytes: S."""
    no_graph("isend", x, "send, whose backward receives the gradient")
    return _message("send", x.detach().contiguous(), axis, axis.rank, to, async_op=True)


@explained
def irecv(like: torch.Tensor, axis: Axis, source: int):
    """Start receiving a tensor of the shape and dtype of `like` from position `source`; returns a Handle."""
    empty = torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)
    return _message("recv", empty, axis, source, axis.rank, async_op=True)


def _message(op: str, x: torch.Tensor, axis: Axis, source: int, to: int, async_op: bool):
    if source % axis.size == to % axis.size:
        raise ValueError(
            f"{op}: position {to} of axis {axis.name!r} is this rank itself. Keep the tensor instead."
        )
    pair, size, way = (axis.ranks[source], axis.ranks[to]), byte_size(x), axis.way(source, to)
    if op == "recv":
        start = lambda _: dist.irecv(x, pair[0], group=way)
        return perform(Call(op, axis, shape_and_dtype(x), pair=pair), start, x, async_op)
    start = lambda _: paced.deliver(*pair, size, lambda: dist.isend(x, pair[1], group=way))
    return perform(Call(op, axis, shape_and_dtype(x), size, 1, pair=pair), start, x, async_op)
