"""Messages between two ranks that autograd may pass through: send, recv, a shift around the ring, halos.

The gradient takes the way back: what was received is sent, what was sent is received.
"""

import torch

from .collectives import irecv, isend
from .mesh import Axis


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
    if x.size(dim) < max(before, after):
        raise ValueError(
            f"halo_exchange: {x.size(dim)} rows cannot lend {max(before, after)} to a neighbour."
        )
    return _Halo.apply(x, axis, before, after, dim)


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, before, after, dim):
        ctx.options = axis, before, after, dim
        n = x.size(dim)
        left, right = x.narrow(dim, n - before, before), x.narrow(dim, 0, after)
        ahead, behind = _swap(left, right, axis)  # what comes from the left, what from the right
        return torch.cat([ahead, x, behind], dim)

    @staticmethod
    def backward(ctx, grad):
        axis, before, after, dim = ctx.options
        n = grad.size(dim) - before - after
        own = grad.narrow(dim, before, n).clone()
        from_left, from_right = _swap(grad.narrow(dim, before + n, after), grad.narrow(dim, 0, before), axis)
        own.narrow(dim, n - before, before).add_(from_right)
        own.narrow(dim, 0, after).add_(from_left)
        return own, None, None, None, None


def _swap(to_right, to_left, axis):
    """Send a strip to each neighbour on the line; returns those from left and right, zeros at the ends."""
    from_left, from_right = torch.zeros_like(to_right), torch.zeros_like(to_left)
    left, right = axis.rank > 0, axis.rank + 1 < axis.size
    going = [isend(to_right, axis, axis.rank + 1)] if right and to_right.numel() else []
    going += [isend(to_left, axis, axis.rank - 1)] if left and to_left.numel() else []
    if left and to_right.numel():
        from_left = irecv(from_left, axis, axis.rank - 1).wait()
    if right and to_left.numel():
        from_right = irecv(from_right, axis, axis.rank + 1).wait()
    for handle in going:
        handle.wait()
    return from_left, from_right


def _shift(x, axis, by, shape):
    """Send x to the rank `by` places on, receive the tensor of `shape` from the rank `by` places back."""
    to, source = (axis.rank + by) % axis.size, (axis.rank - by) % axis.size
    if to == axis.rank:
        return x.clone()
    going = isend(x, axis, to)
    coming = irecv(x.new_empty(shape), axis, source).wait()
    going.wait()
    return coming


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
