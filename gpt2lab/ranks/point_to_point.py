"""Differentiable messages between two ranks: send, recv, a shift around the ring.

The gradient travels in the opposite direction: backward of a send receives, backward of a receive sends. `shift` is
`ring_shift` without a backward; with `async_op=True` it returns an object to `wait()` for.
"""

from itertools import permutations

import torch

from .buffers import no_graph
from .call import explained, finished
from .collectives import irecv, isend
from .mesh import Axis


class Exchange:
    """Messages in progress, sent and received; `wait()` returns `finish(*received)`."""

    def __init__(self, coming, going, finish):
        self._coming, self._going, self._finish = coming, going, finish

    def wait(self):
        """Block until all have arrived."""
        if self._finish is not None:
            came = [handle.wait() for handle in self._coming]
            for handle in self._going:
                handle.wait()
            self._result, self._finish = self._finish(*came), None
        return self._result


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, to):
        ctx.axis, ctx.to, ctx.like = axis, to, torch.empty_like(x)
        isend(x, axis, to).wait()
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        return irecv(ctx.like, ctx.axis, ctx.to).wait(), None, None


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, like, axis, source):
        ctx.axis, ctx.source = axis, source
        return irecv(like, axis, source).wait()

    @staticmethod
    def backward(ctx, grad):
        isend(grad, ctx.axis, ctx.source).wait()
        return torch.zeros_like(grad), None, None


@explained
def send(x: torch.Tensor, axis: Axis, to: int) -> torch.Tensor:
    """Send x to the rank at position `to` and wait: two ranks that both send first wait forever. Bytes: S.

    Returns a zero. Backward through that zero (add it to a loss) receives the gradient of x from `to`.
    """
    return _Send.apply(x, axis, to)


@explained
def recv(like: torch.Tensor, axis: Axis, source: int) -> torch.Tensor:
    """Receive a tensor of the shape and dtype of `like` from the rank at position `source`.

    Backward, where `like` requires a gradient: sends the gradient to `source`.
    """
    return _Recv.apply(like, axis, source)


def _shift(x, axis, by, shape, async_op=False):
    """Send x to the rank `by` positions further, receive the tensor of `shape` from the rank `by` positions before."""
    to, source = (axis.rank + by) % axis.size, (axis.rank - by) % axis.size
    if to == axis.rank:
        return finished(x.clone(), async_op)
    going = isend(x, axis, to)
    exchange = Exchange([irecv(x.new_empty(shape), axis, source)], [going], lambda came: came)
    return exchange if async_op else exchange.wait()


@explained
def shift(x, axis: Axis, by: int = 1, shape=None, async_op: bool = False):
    """`ring_shift` without a backward."""
    no_graph("shift", x, "ring_shift")
    return _shift(x, axis, by, tuple(shape or x.shape), async_op)


class _RingShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, by, shape):
        ctx.options = axis, by, x.shape
        return _shift(x, axis, by, shape)

    @staticmethod
    def backward(ctx, grad):
        axis, by, shape = ctx.options
        return _shift(grad, axis, -by, shape), None, None, None


@explained
def ring_shift(x, axis: Axis, by: int = 1, shape=None):
    """The x of the rank `by` positions before this one on the ring, of `shape` if that differs. Bytes: S.

    Backward: the shift by -`by`.
    """
    return x if axis.size == 1 else _RingShift.apply(x, axis, by, tuple(shape or x.shape))


def open_pairs(axis: Axis) -> None:
    """Open the connection of every pair, both ways, in the same order on all ranks.

    NCCL opens one at its first message and blocks until both ranks do: in another order they could wait in a circle.
    """
    nothing = torch.zeros(1, device="cuda" if torch.cuda.is_available() else "cpu")
    for source, to in sorted(permutations(range(axis.size), 2), key=lambda pair: (min(pair), max(pair))):
        if axis.rank == source:
            isend(nothing, axis, to).wait()
        elif axis.rank == to:
            irecv(nothing, axis, source).wait()
