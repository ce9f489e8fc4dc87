"""Ring: chunks go around the ring; n-1 steps add them up, n-1 steps share the sums. No algorithm sends fewer bytes.

Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
Bytes per rank: 2 (n-1)/n S. Time 2 (n-1) alpha + 2 (n-1)/n S beta.
"""

import torch

from ..ranks import comm
from ..ranks.mesh import Axis


def all_reduce(x, axis: Axis):
    """The sum over the axis on every rank."""
    mine = reduce_scatter(x.reshape(-1), axis)
    return torch.cat(all_gather(mine, axis, comm.split_sizes(x.numel(), axis.size))).view(x.shape)


def reduce_scatter(flat, axis: Axis):
    """The sum of this rank's chunk: in each step, receive a partial sum, add the own chunk, send it on."""
    n, r = axis.size, axis.rank
    chunks = list(flat.tensor_split(n))
    partial = chunks[(r - 1) % n]
    for s in range(n - 1):
        mine = chunks[(r - 2 - s) % n]  # the chunk whose partial sum is received now
        partial = comm.ring_shift(partial, axis, 1, mine.shape) + mine
    return partial


def all_gather(mine, axis: Axis, sizes):
    """All ranks' chunks in order: in each step, send on the chunk that was received last."""
    n, r = axis.size, axis.rank
    chunks = [mine.new_empty(size) for size in sizes]
    chunks[r] = mine
    for s in range(n - 1):
        coming = (r - 1 - s) % n
        chunks[coming] = comm.ring_shift(chunks[(r - s) % n], axis, 1, chunks[coming].shape)
    return chunks
