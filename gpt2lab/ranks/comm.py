"""Every byte between ranks passes through here: counted, logged, out of place, with both directions written out.

The first part are plain calls without autograd. The last part pairs them: each differentiable call names its adjoint.
A size-1 axis is the identity. What carries the bytes (gloo, NCCL, ...) was chosen by name at launch.

S is the number of bytes of the whole tensor, c_r those of rank r's chunk (sizes as `tensor_split` gives them). Each
call counts what this rank sends in the bandwidth-optimal algorithm (a ring), in exact integers.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import board
from .mesh import Axis

REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Event:
    """One call: what this rank sent (bytes, messages) over which axis, from start to end in seconds."""

    op: str
    axis: str
    bytes: int
    messages: int
    start: float
    end: float


log: list[Event] = []


def clear_log() -> None:
    """Forget the events so far."""
    log.clear()


def traffic() -> dict[tuple[str, str], tuple[int, int, int]]:
    """(calls, bytes, messages) sent by this rank, by (operation, axis)."""
    table = defaultdict(lambda: (0, 0, 0))
    for e in log:
        calls, size, messages = table[e.op, e.axis]
        table[e.op, e.axis] = (calls + 1, size + e.bytes, messages + e.messages)
    return dict(table)


def split_sizes(total: int, parts: int) -> list[int]:
    """How `tensor_split` divides: sizes differ by at most one, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


class Handle:
    """An operation under way; `wait()` returns its result and logs it."""

    def __init__(self, work, result, finish):
        self._work, self._result, self._finish = work, result, finish

    def wait(self):
        """Block until the operation is done; returns the resulting tensor."""
        if self._finish:
            for work in self._work:
                work.wait()
            self._finish()
            self._finish = None
        return self._result


@contextmanager
def _call(op: str, axis: Axis, size: int, messages: int, x: torch.Tensor, peers=None):
    """Note on the board what this rank is doing, then append the finished call to the log."""
    board.enter(op, axis.name, axis.peers if peers is None else peers, len(log) + 1, _describe(x))
    start = time.perf_counter()
    yield
    log.append(Event(op, axis.name, size, messages, start, time.perf_counter()))
    board.leave()


def _describe(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _bytes(x: torch.Tensor, sizes: Sequence[int] | None = None, dim: int = 0) -> list[int]:
    """Bytes of x, or of its chunks of `sizes` along `dim`."""
    if sizes is None:
        return x.numel() * x.element_size()
    line = x.numel() * x.element_size() // max(x.size(dim), 1)
    return [line * s for s in sizes]


# Plain calls, without autograd


def _no_graph(op: str, x: torch.Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            f"{op} has no backward of its own. Use copy_to (sums in backward) or reduce_from (sums in forward)."
        )


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum", async_op: bool = False, own: bool = False):
    """The sum (max, min) over the axis, on every rank; with async_op a Handle.

    `own` says that x is a contiguous buffer of the caller's, unknown to autograd: then the result replaces it.
    Bytes per rank: reduce-scatter plus all-gather, 2 (n-1)/n S (Patarasuk & Yuan 2009).
    """
    _no_graph("all_reduce", x)
    if axis.size == 1:
        return Handle([], x, None) if async_op else x
    chunks = [c * x.element_size() for c in split_sizes(x.numel(), axis.size)]
    size = 2 * sum(chunks) - chunks[axis.rank] - chunks[(axis.rank + 1) % axis.size]
    result = x.detach() if own else x.detach().clone(memory_format=torch.contiguous_format)
    start = lambda: dist.all_reduce(result, REDUCE[op], group=axis.group, async_op=async_op)
    return _run("all_reduce", axis, size, 2 * (axis.size - 1), x, result, start, async_op)


def gather_flat(shard: torch.Tensor, axis: Axis, async_op: bool = False, out: torch.Tensor | None = None):
    """Everybody's shards (s,) of equal length as one (n s,); with async_op a Handle. Bytes: (n-1)/n S."""
    if axis.size == 1:
        out = shard.detach() if out is None else out.copy_(shard)
        return Handle([], out, None) if async_op else out
    out = shard.new_empty(axis.size * shard.numel()) if out is None else out
    start = lambda: dist.all_gather_single(out, shard.detach(), group=axis.group, async_op=async_op)
    size = (axis.size - 1) * _bytes(shard)
    return _run("all_gather", axis, size, axis.size - 1, shard, out, start, async_op)


def reduce_scatter_flat(x: torch.Tensor, axis: Axis, async_op: bool = False):
    """The sum over the axis of x (n s,), of which each rank gets its (s,); with async_op a Handle. Bytes: (n-1)/n S."""
    if axis.size == 1:
        return Handle([], x.detach(), None) if async_op else x.detach()
    out = x.new_empty(x.numel() // axis.size)
    start = lambda: dist.reduce_scatter_single(out, x.detach(), group=axis.group, async_op=async_op)
    size = (axis.size - 1) * _bytes(out)
    return _run("reduce_scatter", axis, size, axis.size - 1, x, out, start, async_op)


def _run(op: str, axis: Axis, size: int, messages: int, x, result, start, async_op: bool):
    """Run a call now and return its result, or start it and return a Handle."""
    if not async_op:
        with _call(op, axis, size, messages, x):
            start()
        return result
    begun = time.perf_counter()
    finish = lambda: log.append(Event(op, axis.name, size, messages, begun, time.perf_counter()))
    return Handle([start()], result, finish)


def reduce(x: torch.Tensor, axis: Axis, root: int = 0):
    """The sum over the axis on the rank at place `root`; what the others get back means nothing.

    Bytes per rank: S, along a chain that ends at the root; the root sends none.
    """
    _no_graph("reduce", x)
    if axis.size == 1:
        return x
    mine = axis.rank == root
    result = x.detach().clone(memory_format=torch.contiguous_format)
    with _call("reduce", axis, 0 if mine else _bytes(x), int(not mine), x):
        dist.reduce(result, axis.ranks[root], group=axis.group)
    return result


def broadcast(x: torch.Tensor, axis: Axis, root: int = 0):
    """Root's tensor on every rank; the others' x says shape and dtype.

    Bytes per rank: S, along a chain that starts at the root; its last rank sends none.
    """
    _no_graph("broadcast", x)
    if axis.size == 1:
        return x
    last = axis.rank == (root - 1) % axis.size
    result = x.detach().clone(memory_format=torch.contiguous_format)
    with _call("broadcast", axis, 0 if last else _bytes(x), int(not last), x):
        dist.broadcast(result, axis.ranks[root], group=axis.group)
    return result


def barrier(axis: Axis) -> None:
    """Return when every rank of the axis has arrived."""
    if axis.size > 1:
        with _call("barrier", axis, 0, 0, torch.empty(0)):
            dist.barrier(group=axis.group)


def gather_objects(value, axis: Axis) -> list:
    """Any picklable value of every rank, as a list on every rank. For small things: reports, shapes, states."""
    if axis.size == 1:
        return [value]
    values = [None] * axis.size
    with _call("gather_objects", axis, 0, axis.size - 1, torch.empty(0)):
        dist.all_gather_object(values, value, group=axis.group)
    return values


def isend(x: torch.Tensor, axis: Axis, to: int) -> Handle:
    """Start sending x to the rank at place `to` of the axis. Bytes: S."""
    _no_graph("isend", x)
    x = x.detach().contiguous()
    start = time.perf_counter()
    work = dist.isend(x, axis.ranks[to], group=axis.group)
    return Handle([work], x, lambda: log.append(_event("send", axis, _bytes(x), 1, start)))


def irecv(like: torch.Tensor, axis: Axis, source: int) -> Handle:
    """Start receiving a tensor of the shape and dtype of `like` from the rank at place `source` of the axis."""
    result = torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)
    start = time.perf_counter()
    work = dist.irecv(result, axis.ranks[source], group=axis.group)
    return Handle([work], result, lambda: log.append(_event("recv", axis, 0, 0, start)))


def _event(op: str, axis: Axis, size: int, messages: int, start: float) -> Event:
    return Event(op, axis.name, size, messages, start, time.perf_counter())


def send(x: torch.Tensor, axis: Axis, to: int) -> None:
    """Send x to the rank at place `to` of the axis, and wait. Two ranks that both send first wait forever."""
    with _call("send", axis, _bytes(x), 1, x, peers=(axis.ranks[to],)):
        dist.send(x.detach().contiguous(), axis.ranks[to], group=axis.group)


def recv(like: torch.Tensor, axis: Axis, source: int) -> torch.Tensor:
    """Receive a tensor of the shape and dtype of `like` from the rank at place `source` of the axis."""
    result = torch.empty_like(like, memory_format=torch.contiguous_format, requires_grad=False)
    with _call("recv", axis, 0, 0, like, peers=(axis.ranks[source],)):
        dist.recv(result, axis.ranks[source], group=axis.group)
    return result


def _all_gather(x, axis, dim=0, sizes=None):
    """Everybody's shards, joined along dim; `sizes` are their lengths where they differ. Bytes: S - c_(r+1)."""
    if axis.size == 1:
        return x
    sizes = sizes or [x.size(dim)] * axis.size
    longest = max(sizes)
    mine = x.detach().movedim(dim, 0).contiguous()
    if mine.size(0) < longest:  # gloo wants equal shapes: pad, and cut after
        mine = torch.cat([mine, mine.new_zeros(longest - mine.size(0), *mine.shape[1:])])
    parts = [torch.empty_like(mine) for _ in axis.ranks]
    line = x.numel() * x.element_size() // max(x.size(dim), 1)
    size = line * (sum(sizes) - sizes[(axis.rank + 1) % axis.size])
    with _call("all_gather", axis, size, axis.size - 1, x):
        dist.all_gather(parts, mine, group=axis.group)
    return torch.cat([p[:s] for p, s in zip(parts, sizes, strict=True)]).movedim(0, dim)


def _reduce_scatter(x, axis, dim=0, sizes=None):
    """The sum over the axis, of which each rank keeps its chunk along dim. Bytes: S - c_r."""
    if axis.size == 1:
        return x
    sizes = sizes or split_sizes(x.size(dim), axis.size)
    parts = [p.contiguous() for p in x.detach().movedim(dim, 0).split(list(sizes))]
    result = torch.empty_like(parts[axis.rank])
    chunks = _bytes(x, sizes, dim)
    with _call("reduce_scatter", axis, sum(chunks) - chunks[axis.rank], axis.size - 1, x):
        dist.reduce_scatter(result, parts, group=axis.group)
    return result.movedim(0, dim)


def _keep_mine(x, axis, dim=0, sizes=None):
    """This rank's chunk of a tensor that every rank has. No bytes."""
    if axis.size == 1:
        return x
    return x.split(list(sizes or split_sizes(x.size(dim), axis.size)), dim)[axis.rank].contiguous()


def _identity(x, axis):
    return x.view_as(x)


def _sum(x, axis):
    return all_reduce(x.detach(), axis)


# Differentiable calls: forward and adjoint side by side


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
    return call


copy_to = _pair("copy_to", _identity, _sum, "Forward: identity. Backward: all-reduce (Megatron's f).")
reduce_from = _pair("reduce_from", _sum, _identity, "Forward: all-reduce. Backward: identity (Megatron's g).")
_gather_sum = _pair("all_gather", _all_gather, _reduce_scatter, "")
_gather_same = _pair("gather_replicated", _all_gather, _keep_mine, "")
_scatter_sum = _pair("reduce_scatter", _reduce_scatter, _all_gather, "")
_scatter_same = _pair("scatter_to", _keep_mine, _all_gather, "")


def all_gather(x, axis: Axis, dim: int = 0, sizes: Sequence[int] | None = None):
    """Everybody's shards joined along dim (`sizes`: their lengths, where they differ).

    Backward: reduce-scatter, because every rank uses the result in its own way. Bytes: S - c_(r+1).
    """
    return _gather_sum(x, axis, dim, sizes or [x.size(dim)] * axis.size)


def gather_replicated(x, axis: Axis, dim: int = 0, sizes: Sequence[int] | None = None):
    """Everybody's shards joined along dim, for a result that all ranks use identically.

    Backward: keep the own slice. Bytes: S - c_(r+1) forward, none backward.
    """
    return _gather_same(x, axis, dim, sizes or [x.size(dim)] * axis.size)


def reduce_scatter(x, axis: Axis, dim: int = 0, sizes: Sequence[int] | None = None):
    """The sum over the axis, of which each rank keeps its chunk along dim. Backward: all-gather. Bytes: S - c_r."""
    return _scatter_sum(x, axis, dim, sizes or split_sizes(x.size(dim), axis.size))


def scatter_to(x, axis: Axis, dim: int = 0, sizes: Sequence[int] | None = None):
    """This rank's chunk along dim of a tensor that all ranks hold alike. Backward: all-gather."""
    return _scatter_same(x, axis, dim, sizes or split_sizes(x.size(dim), axis.size))
