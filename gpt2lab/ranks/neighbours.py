"""Messages between two ranks that autograd may pass through: send, recv, a shift around the ring, halos.

The gradient takes the way back: what was received is sent, what was sent is received. `shift` and `halo` are the last
two without a backward; with `async_op=True` they return what to `wait()` for.
"""

import torch

from .buffers import no_graph
from .collectives import irecv, isend
from .gate import finished
from .mesh import Axis


class Exchange:
    """Messages under way, some going and some coming; `wait()` returns what `finish` makes of those that came."""

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


def send(x: torch.Tensor, axis: Axis, to: int) -> torch.Tensor:
    """Send x to the rank at place `to` and wait: two ranks that both send first wait forever. Bytes: S.

    Returns a zero. Backward through that zero (add it to a loss) receives the gradient of x from `to`.
    """
    return _Send.apply(x, axis, to)


def recv(like: torch.Tensor, axis: Axis, source: int) -> torch.Tensor:
    """Receive a tensor of the shape and dtype of `like` from the rank at place `source`.

    Backward, where `like` requires a gradient: sends the gradient to `source`.
    """
    return _Recv.apply(like, axis, source)


def halo_exchange(x, axis: Axis, before: int, after: int, dim: int = 0):
    """x with the last `before` rows of the left neighbour in front and the first `after` of the right one behind.

    The ends of the line get zeros. Backward: gradients of lent rows are *added* to their owner's. Bytes: an inner rank
    sends before + after rows.
    """
    _can_lend(x, before, after, dim)
    return _Halo.apply(x, axis, before, after, dim)


def halo(x, axis: Axis, before: int, after: int, dim: int = 0, async_op: bool = False):
    """What `halo_exchange` gives, without a backward."""
    no_graph("halo", x, "halo_exchange")
    _can_lend(x, before, after, dim)
    return _halo(x, axis, before, after, dim, async_op)


def _can_lend(x, before, after, dim):
    if x.size(dim) < max(before, after):
        raise ValueError(
            f"halo_exchange: {x.size(dim)} rows cannot lend {max(before, after)} to a neighbour."
        )


def _halo(x, axis, before, after, dim, async_op=False):
    left, right = x.narrow(dim, x.size(dim) - before, before), x.narrow(dim, 0, after)
    join = lambda strips: torch.cat([strips[0], x, strips[1]], dim)  # what came from the left, from the right
    if async_op:
        return Exchange([_swap(left, right, axis, async_op)], [], join)
    return join(_swap(left, right, axis))


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, before, after, dim):
        ctx.options = axis, before, after, dim
        return _halo(x, axis, before, after, dim)

    @staticmethod
    def backward(ctx, grad):
        axis, before, after, dim = ctx.options
        n = grad.size(dim) - before - after
        own = grad.narrow(dim, before, n).clone()
        from_left, from_right = _swap(grad.narrow(dim, before + n, after), grad.narrow(dim, 0, before), axis)
        own.narrow(dim, n - before, before).add_(from_right)
        own.narrow(dim, 0, after).add_(from_left)
        return own, None, None, None, None


def _swap(to_right, to_left, axis, async_op=False):
    """Send a strip to each neighbour on the line; returns those from left and right, zeros at the ends."""
    left, right = axis.rank > 0, axis.rank + 1 < axis.size
    going = [isend(to_right, axis, axis.rank + 1)] if right and to_right.numel() else []
    going += [isend(to_left, axis, axis.rank - 1)] if left and to_left.numel() else []
    from_left = [irecv(to_right, axis, axis.rank - 1)] if left and to_right.numel() else []
    from_right = [irecv(to_left, axis, axis.rank + 1)] if right and to_left.numel() else []

    def strips(*came):
        first = came[0] if from_left else torch.zeros_like(to_right)
        return first, came[-1] if from_right else torch.zeros_like(to_left)

    exchange = Exchange([*from_left, *from_right], going, strips)
    return exchange if async_op else exchange.wait()


def _shift(x, axis, by, shape, async_op=False):
    """Send x to the rank `by` places on, receive the tensor of `shape` from the rank `by` places back."""
    to, source = (axis.rank + by) % axis.size, (axis.rank - by) % axis.size
    if to == axis.rank:
        return finished(x.clone(), async_op)
    going = isend(x, axis, to)
    exchange = Exchange([irecv(x.new_empty(shape), axis, source)], [going], lambda came: came)
    return exchange if async_op else exchange.wait()


def shift(x, axis: Axis, by: int = 1, shape=None, async_op: bool = False):
    """What `ring_shift` gives, without a backward."""
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


def ring_shift(x, axis: Axis, by: int = 1, shape=None):
    """x of the rank `by` places back on the ring; `shape`, where it differs. Bytes: S.

    Backward: the shift by -`by`.
    """
    return x if axis.size == 1 else _RingShift.apply(x, axis, by, tuple(shape or x.shape))
