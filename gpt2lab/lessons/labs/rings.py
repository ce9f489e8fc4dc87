"""Tensor parallelism without waiting: products in as many parts as there are ranks, while a ring carries the next one.

Sequence parallelism gathers tokens before one product and sums them after another; here each part of a product is
computed while another part of the tokens, or of the sum, travels. The bytes stay the same, in n-1 messages a call.

Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models",
ASPLOS (collective matmul); PyTorch's asynchronous tensor parallelism (2024).
"""

import torch

from ...ranks import comm, paced, trace
from ...ranks.mesh import Mesh
from .instruments import asleep, begin


def gathered(x, axis, sizes, use) -> None:
    """Call `use(place, part)` with each rank's part of the tokens (..., T, C); x is this rank's (..., T_r, C).

    While one is used the next one travels. Bytes per rank: those of an all-gather.
    """
    for hop in range(axis.size):
        place, coming = (axis.rank - hop) % axis.size, None
        if hop + 1 < axis.size:
            shape = (*x.shape[:-2], sizes[place - 1], x.size(-1))
            coming = comm.ring_shift(x, axis, async_op=True, shape=shape)
        use(place, x)
        x = coming and coming.wait()


def scattered(term, axis, sizes):
    """The sum of all ranks' `term(place)` (..., T_place, C) at this rank's place; all ranks call this.

    While one is computed the sum of those before travels. Bytes per rank: those of a reduce-scatter.
    """
    total = term((axis.rank - 1) % axis.size)
    for hop in range(2, axis.size + 1):
        place = (axis.rank - hop) % axis.size
        shape = (*total.shape[:-2], sizes[place], total.size(-1))
        coming = comm.ring_shift(total, axis, async_op=True, shape=shape)
        own = term(place)
        total = coming.wait() + own
    return total


def two_layers(rank: int, world_size: int, parts: bool) -> list:
    """Spans of a paced forward of a column- and a row-parallel layer: products sleep, messages are real."""
    axis, x = Mesh(tp=world_size)["tp"], torch.ones(1, 64, 1024)  # a part: 256 KiB
    sizes, name = [64] * world_size, ("fc", "proj")

    product = lambda layer, share: asleep(name[layer], "forward", 0.08 * share)

    def term(place):
        product(1, 1 / world_size)
        return x

    begin(axis)
    with paced.use(paced.Link(latency=0.0005, bandwidth=15e6)):
        if parts:
            gathered(x, axis, sizes, lambda place, part: product(0, 1 / world_size))
            scattered(term, axis, sizes)
        else:
            comm.all_gather(x, axis, 1)
            product(0, 1)
            product(1, 1)
            comm.reduce_scatter(torch.cat([x] * world_size, 1), axis, 1)
    return trace.spans()
