"""Every call between ranks. Each stands here once, below the call that its gradient makes on the way back.

A function takes a tensor x and an axis of the mesh, and gives a new tensor; `root`, `to` and `source` are positions
along the axis. Above it, `@adjoint` gives its backward: a call with the gradient, the shape of x, and the arguments of
the forward call. Calls below `@forward_only` have none. With `async_op=True` no call has one, and each gives a Handle,
whose `wait()` gives the result. On an axis of one rank a call gives x as it is.

All bytes between ranks pass through here: counted, logged, out of place. S is the number of bytes of the whole tensor,
c_r those of rank r's chunk (sizes as `tensor_split` gives them). Counted is what this rank sends in the
bandwidth-optimal algorithm, a ring (Patarasuk & Yuan 2009), in exact integers, whatever carries it (chosen at launch).
"""

import pickle
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..machine.arguments import checked
from . import buffers, call, paced
from . import traffic as counted
from .axis import Axis
from .buffers import byte_sizes, chunk_sizes, padded, shard_sizes
from .call import Call, Exchange, adjoint, forward_only

Handle, finished = call.Handle, call.finished
log, clear_log, traffic = counted.log, counted.clear_log, counted.traffic
split_sizes = checked(total=0, parts=(1, 10**6))(counted.split_sizes)
Sizes = Sequence[int] | None
REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@forward_only("copy_to (sums in backward) or reduce_from (in forward)")
def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum", own: bool = False):
    """The sum (max, min) over the axis, on every rank.

    With `own` the result replaces x, which must be contiguous. A NaN on any rank gives a NaN on every rank, also in a
    max or min, where a backend alone could lose it. Bytes per rank: reduce-scatter plus all-gather, 2 (n-1)/n S; a max
    or min of 16-bit floats is sent as 32 bits.
    """
    if op not in REDUCE:
        raise ValueError(f"all_reduce: op={op!r} is not one of sum, max, min.")
    if own and not x.is_contiguous():
        raise ValueError(f"all_reduce: own=True needs a contiguous buffer, got strides {x.stride()}.")
    if axis.size == 1:
        return x
    compared = op != "sum" and x.is_floating_point()
    y = buffers.ranked(x, op) if compared else x.detach() if own else fresh(x)
    back = lambda y: x.detach().copy_(buffers.unranked(y, x.dtype)) if own else buffers.unranked(y, x.dtype)
    start = lambda **how: dist.all_reduce(y, REDUCE[op], **how)
    ring = [n * y.element_size() for n in counted.split_sizes(x.numel(), axis.size)]
    return Call("all_reduce", axis, f"{op} {described(x)}", start, y, back if compared else None, ring)


@adjoint(lambda grad, shape, axis: reduce_from(grad, axis))
def copy_to(x, axis: Axis):
    """Forward: identity. Backward: all-reduce (Megatron's f)."""
    return x.view_as(x)


@adjoint(lambda grad, shape, axis: copy_to(grad, axis))
def reduce_from(x, axis: Axis):
    """Forward: all-reduce. Backward: identity (Megatron's g)."""
    return all_reduce.__wrapped__(x, axis)


@adjoint(lambda grad, shape, axis, dim=0, sizes=None: reduce_scatter(grad, axis, dim, sizes))
def all_gather(x, axis: Axis, dim: int = 0, sizes: Sizes = None):
    """All ranks' shards joined along dim (`sizes`: their lengths, where they differ).

    Backward: reduce-scatter, because every rank uses the result differently. Bytes: S - c_(r+1).
    """
    sizes = shard_sizes("all_gather", x, axis, dim, sizes)
    mine = padded(x.movedim(dim, 0), max(sizes))
    parts = [torch.empty_like(mine) for _ in sizes]
    start = lambda **how: dist.all_gather(parts, mine, **how)
    join = lambda parts: buffers.unpadded(parts, sizes, dim)
    detail = f"dim {dim} sizes {sizes} of {described(mine)}"
    return Call("all_gather", axis, detail, start, parts, join, byte_sizes(x, sizes, dim))


@adjoint(lambda grad, shape, axis, dim=0, sizes=None: scatter_to(grad, axis, dim, sizes))
def gather_replicated(x, axis: Axis, dim: int = 0, sizes: Sizes = None):
    """All ranks' shards joined along dim, for a result that all ranks use identically.

    Backward: each rank keeps its own slice. Bytes: S - c_(r+1) forward, none backward.
    """
    return all_gather.__wrapped__(x, axis, dim, sizes)


def _chunks_joined(grad, shape, axis, dim=0, sizes=None):
    return all_gather(grad, axis, dim, sizes or counted.split_sizes(shape[dim], axis.size))


@adjoint(_chunks_joined)
def scatter_to(x, axis: Axis, dim: int = 0, sizes: Sizes = None):
    """This rank's chunk along dim of a tensor that is equal on all ranks. Backward: all-gather."""
    return x.split(chunk_sizes("scatter_to", x, axis, dim, sizes), dim)[axis.rank].contiguous()


@adjoint(_chunks_joined)
def reduce_scatter(x, axis: Axis, dim: int = 0, sizes: Sizes = None):
    """The sum over the axis, of which each rank keeps its chunk along dim. Backward: all-gather. Bytes: S - c_r."""
    sizes = chunk_sizes("reduce_scatter", x, axis, dim, sizes)
    parts = [p.contiguous() for p in x.movedim(dim, 0).split(sizes)]
    y = torch.empty_like(parts[axis.rank])
    start = lambda **how: dist.reduce_scatter(y, parts, **how)
    move = lambda y: y.movedim(0, dim)
    detail = f"dim {dim} sizes {sizes} of {described(x)}"
    return Call("reduce_scatter", axis, detail, start, y, move, byte_sizes(x, sizes, dim))


def described(x: torch.Tensor) -> str:
    """Shape and dtype, as shown in messages: `(3, 4) float64`."""
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def fresh(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: gloo silently reads and writes the wrong memory of a strided tensor."""
    return x.detach().clone(memory_format=torch.contiguous_format)


@forward_only()
def gather_flat(shard: torch.Tensor, axis: Axis, out: torch.Tensor | None = None):
    """All ranks' shards (s,) of equal length as one (n s,). Bytes per rank: (n-1)/n S."""
    mine = shard.detach().contiguous()
    if axis.size == 1:
        return shard.detach() if out is None else out.copy_(mine)
    y = shard.new_empty(axis.size * shard.numel()) if out is None else out
    start = lambda **how: dist.all_gather_single(y, mine, **how)
    return Call("all_gather", axis, f"flat {described(shard)}", start, y, ring=[shard.nbytes] * axis.size)


@forward_only()
def reduce_scatter_flat(x: torch.Tensor, axis: Axis, what: str = "flat"):
    """The sum over the axis of x (n s,); each rank gets its (s,). `what` names x in errors. Bytes: (n-1)/n S."""
    if axis.size == 1:
        return x.detach()
    if x.dim() != 1 or x.numel() % axis.size:
        raise ValueError(
            f"reduce_scatter_flat: {tuple(x.shape)} must be (n,) with n a multiple of {axis.size} ranks."
        )
    y, whole = x.new_empty(x.numel() // axis.size), x.detach().contiguous()
    start = lambda **how: dist.reduce_scatter_single(y, whole, **how)
    return Call("reduce_scatter", axis, f"{what} {described(x)}", start, y, ring=[y.nbytes] * axis.size)


@adjoint(lambda grad, shape, axis, root=0: reduce(grad, axis, root))
def broadcast(x, axis: Axis, root: int = 0):
    """The root's tensor on every rank; the others' x gives shape and dtype. Backward: reduce to the root.

    Bytes per rank: S, along a chain that starts at the root; its last rank sends none.
    """
    y = fresh(x)
    start = lambda **how: dist.broadcast(y, axis.ranks[root], **how)
    cost, pace = counted.chain_cost(y.nbytes, axis.rank == (root - 1) % axis.size), (y.nbytes, axis.size - 1)
    return Call("broadcast", axis, f"root {root} {described(x)}", start, y, cost=cost, pace=pace)


@adjoint(lambda grad, shape, axis, root=0: broadcast(grad, axis, root))
def reduce(x, axis: Axis, root: int = 0):
    """The sum over the axis on the rank at position `root`, zeros elsewhere. Backward: broadcast.

    Bytes per rank: S, along a chain that ends at the root; the root sends none.
    """
    y, mine = fresh(x), axis.at(root)
    start = lambda **how: dist.reduce(y, axis.ranks[root], **how)
    cost, pace = counted.chain_cost(y.nbytes, mine), (y.nbytes, axis.size - 1)
    total = lambda y: y if mine else y.zero_()
    return Call("reduce", axis, f"root {root} {described(x)}", start, y, total, cost=cost, pace=pace)


def _gathered(grad, shape, axis, dim=0, root=0, sizes=None):
    """Adjoint of scatter: the root gathers; the other ranks' input has no influence, so its gradient is zero."""
    whole = gather(grad, axis, dim, root, sizes or counted.split_sizes(shape[dim], axis.size))
    return whole if axis.at(root) else grad.new_zeros(shape)


@adjoint(_gathered)
def scatter(x, axis: Axis, dim: int = 0, root: int = 0, sizes: Sizes = None):
    """The root's tensor cut along dim, a chunk per rank; the others' x gives shape and dtype. Backward: gather.

    Bytes: the root S - c_root, the others none.
    """
    sizes = chunk_sizes("scatter", x, axis, dim, sizes)
    like, mine, chunks = x.movedim(dim, 0), axis.at(root), byte_sizes(x, sizes, dim)
    chunk = like.new_empty(max(sizes), *like.shape[1:])
    parts = [padded(p, max(sizes)) for p in like.split(sizes)] if mine else None
    start = lambda **how: dist.scatter(chunk, parts, axis.ranks[root], **how)
    detail = f"root {root} dim {dim} sizes {sizes} of {described(x)}"
    cut = lambda chunk: chunk[: sizes[axis.rank]].movedim(0, dim)
    sends, pace = counted.direct_sends(chunks, axis) if mine else (), counted.direct_cost(chunks, root)
    return Call("scatter", axis, detail, start, chunk, cut, sends=sends, pace=pace)


def _scattered(grad, shape, axis, dim=0, root=0, sizes=None):
    """Adjoint of gather: the root scatters its gradient; the other ranks' outputs are empty."""
    sizes, whole = sizes or [shape[dim]] * axis.size, list(shape)
    whole[dim] = sum(sizes)
    return scatter(grad if axis.at(root) else grad.new_empty(whole), axis, dim, root, sizes)


@adjoint(_scattered)
def gather(x, axis: Axis, dim: int = 0, root: int = 0, sizes: Sizes = None):
    """All ranks' shards joined along dim on the root; the others get length 0 along dim. Backward: scatter.

    Bytes: c_r, the root none.
    """
    sizes = shard_sizes("gather", x, axis, dim, sizes)
    mine, chunks = padded(x.movedim(dim, 0), max(sizes)), byte_sizes(x, sizes, dim)
    parts = [torch.empty_like(mine) for _ in sizes] if axis.at(root) else None
    start = lambda **how: dist.gather(mine, parts, axis.ranks[root], **how)
    detail = f"root {root} dim {dim} sizes {sizes} of {described(mine)}"
    join = lambda _: buffers.unpadded(parts, sizes, dim) if parts else x.detach().narrow(dim, 0, 0)
    sends, pace = () if parts else ((axis.ranks[root], chunks[axis.rank]),), counted.direct_cost(chunks, root)
    return Call("gather", axis, detail, start, parts or mine, join, sends=sends, pace=pace)


@adjoint(lambda grads, shapes_of_parts, axis, shapes=None: all_to_all(grads, axis, shapes_of_parts))
def all_to_all(parts: Sequence[torch.Tensor], axis: Axis, shapes: Sequence | None = None):
    """Part p goes to the rank at position p; gives the list of parts that arrive, of `shapes` (default: those sent).

    Backward: each gradient goes back to the part's rank. Bytes: the parts that leave; an empty part is no message.
    """
    shapes = [tuple(s) for s in (shapes or [p.shape for p in parts])]
    if not len(parts) == len(shapes) == axis.size:
        raise ValueError(f"all_to_all: {len(parts)} parts for {axis.size} ranks. Pass one part per rank.")
    if len(types := {str(p.dtype) for p in parts}) > 1:
        types = " and ".join(sorted(types))
        raise ValueError(f"all_to_all: the parts are of {types}. Pass parts of one type.")
    going, coming = [p.numel() for p in parts], [torch.Size(s).numel() for s in shapes]
    flat = torch.cat([p.reshape(-1) for p in parts])
    y = flat.new_empty(sum(coming))
    start = lambda **how: dist.all_to_all_single(y, flat, coming, going, **how)
    counts = [",".join(map(str, numbers)) for numbers in (going, coming)]
    detail = " ".join([str(flat.dtype).removeprefix("torch."), *counts])
    cut = lambda y: [p.view(s) for p, s in zip(y.split(coming), shapes, strict=True)]
    sends = counted.direct_sends([n * flat.element_size() for n in going], axis)
    return Call("all_to_all", axis, detail, start, y, cut, sends=sends, pace=(0, 0))


@forward_only("send, whose backward receives the gradient", starts=True)
def isend(x: torch.Tensor, axis: Axis, to: int):
    """Start sending x to the rank at position `to`; gives a Handle. Do not change x before `wait`. Bytes: S."""
    x, (pair, group) = x.detach().contiguous(), _way("send", axis, axis.rank, to)
    start = lambda **_: paced.deliver(*pair, x.nbytes, lambda: dist.isend(x, pair[1], group=group))
    return Call("send", axis, described(x), start, x, sends=((pair[1], x.nbytes),), pair=pair)


@forward_only(starts=True)
def irecv(like: torch.Tensor, axis: Axis, source: int):
    """Start receiving a tensor of the shape and dtype of `like` from position `source`; gives a Handle."""
    y = torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)
    pair, group = _way("recv", axis, source, axis.rank)
    start = lambda **_: dist.irecv(y, pair[0], group=group)
    return Call("recv", axis, described(y), start, y, sends=(), pair=pair)


def _way(op: str, axis: Axis, source: int, to: int) -> tuple:
    """The global ranks of a message from one position to another, and the group that carries it."""
    pair = axis.ranks[source], axis.ranks[to]
    if pair[0] == pair[1]:
        where = f"position {to} of axis {axis.name!r}"
        raise ValueError(f"{op}: {where} is this rank itself. Keep the tensor instead.")
    return pair, axis.way(source, to)


@adjoint(lambda grad, shape, axis, to: irecv(grad.new_empty(shape), axis, to).wait(), alone=False)
def send(x: torch.Tensor, axis: Axis, to: int):
    """Send x to the rank at position `to` and wait: two ranks that both send first wait forever. Bytes: S.

    Returns a zero. Backward through that zero (add it to a loss) receives the gradient of x from `to`.
    """
    isend(x, axis, to).wait()
    return x.new_zeros(())


@adjoint(lambda grad, shape, axis, source: torch.zeros_like(isend(grad, axis, source).wait()), alone=False)
def recv(like: torch.Tensor, axis: Axis, source: int):
    """Receive a tensor of the shape and dtype of `like` from the rank at position `source`.

    Backward, where `like` requires a gradient: sends the gradient to `source`.
    """
    return irecv(like, axis, source).wait()


@adjoint(lambda grad, shape_of_x, axis, by=1, shape=None: ring_shift(grad, axis, -by, shape_of_x))
def ring_shift(x, axis: Axis, by: int = 1, shape=None):
    """The x of the rank `by` positions before this one on the ring, of `shape` if that differs. Bytes: S.

    Backward: the shift by -`by`.
    """
    to, source = (axis.rank + by) % axis.size, (axis.rank - by) % axis.size
    if to == axis.rank:
        return x.clone()
    going = isend(x, axis, to)
    return Exchange(irecv(x.new_empty(tuple(shape or x.shape)), axis, source), going)


@forward_only()
def barrier(axis: Axis):
    """Return when every rank of the axis has arrived."""
    if axis.size > 1:
        return Call("barrier", axis, "", dist.barrier, pace=(0, axis.size - 1))


@forward_only()
def gather_objects(value, axis: Axis, aside: bool = False) -> list:
    """Every rank's value (picklable), as a list on every rank. For small things: reports, shapes, states.

    `aside`: from a thread beside the one that makes the calls, over a group of its own; neither announced nor logged.
    """
    values, others = [value] * axis.size, axis.size - 1
    if aside and others:
        dist.all_gather_object(values, value, group=axis.group)
    if aside or not others:
        return values
    cost = others * len(pickle.dumps(value)), others
    start = lambda group, **_: dist.all_gather_object(values, value, group=group)
    return Call("gather_objects", axis, "", start, values, cost=cost)
