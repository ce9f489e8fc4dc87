"""The lecture's tensor parallelism: every matrix cut by columns, an all-gather after each layer.

Simpler than `tensor`, and dearer: a message after every matrix instead of after every second one. Its backward
is the point: the adjoint of an all-gather is a reduce-scatter.

Stanford CS336 (2025), lecture 8; both directions follow from Shoeybi et al. 2019, section 3.
"""

import torch
import torch.nn.functional as F

from .. import spec
from ..ranks import comm
from ..ranks.mesh import Axis


def column_slices(weights, axis: Axis) -> list[torch.Tensor]:
    """This rank's columns of every *serial* weight (C_in, C_out). Drawing shards anew would train another net."""
    return [spec.slice_of(w, axis.rank, axis.size, 1).clone().requires_grad_() for w in weights]


def column_layer(x, w, axis: Axis, width: int):
    """gelu(x W) of x (B, C_in) and this rank's columns w of W (C_in, C_out): (B, C_out), whole on every rank.

    Forward: an all-gather of (B, C_out). Backward: a reduce-scatter of the same size.
    Bytes per rank: (n-1)/n B C_out numbers in each direction.
    """
    return comm.all_gather(F.gelu(x @ w), axis, 1, comm.split_sizes(width, axis.size))


def column_gradients(x, weights, axis: Axis, seed: float | None = None):
    """Sum of squares of the last layer's output, and the gradients of this rank's columns.

    The loss is computed alike on all n ranks, and the reduce-scatter adds up what all of them ask for: each must
    ask for 1/n, so the seed of backward is 1/n and not 1.
    """
    mine = column_slices(weights, axis)
    for w, whole in zip(mine, weights, strict=True):
        x = column_layer(x, w, axis, whole.size(1))
    loss = x.square().sum()
    loss.backward(torch.tensor(1 / axis.size if seed is None else seed, dtype=loss.dtype))
    return loss.detach(), [w.grad for w in mine]
