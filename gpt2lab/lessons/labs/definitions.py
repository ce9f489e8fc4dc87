"""The collectives as lines of NumPy, and what live ranks return for the same calls."""

import numpy as np
import torch

from ...ranks import comm
from ...ranks.mesh import Mesh

LENGTH = 7  # numbers of a rank, which divides by no number of ranks but one


def held(rank: int, length: int = LENGTH) -> torch.Tensor:
    """What a rank holds at first."""
    return torch.arange(float(length)) ** 2 + 10 * rank


def calls(rank: int, world_size: int) -> list[list[float]]:
    """What this rank holds after every collective, from and to every root."""
    axis, x, n = Mesh(dp=world_size)["dp"], held(rank), world_size
    mine, sizes = x[: rank + 1], list(range(1, n + 1))  # of unequal length
    found = [comm.all_reduce(x, axis), comm.all_reduce(x, axis, op="max"), comm.reduce_scatter(x, axis)]
    found += [comm.all_gather(mine, axis, 0, sizes), torch.cat(_to_all(x, axis)), comm.ring_shift(x, axis)]
    for root in range(n):
        found += [comm.broadcast(x, axis, root), comm.scatter(x, axis, 0, root)]
        gathered, total = comm.gather(x, axis, 0, root), comm.reduce(x, axis, root)
        found += [gathered, total] if rank == root else [x[:0], x[:0]]
    return [y.tolist() for y in found]


def _to_all(x, axis) -> list[torch.Tensor]:
    chunks = list(x.tensor_split(axis.size))
    return comm.all_to_all(chunks, axis, [chunks[axis.rank].shape] * axis.size)


def expected(world_size: int) -> list[list[list[float]]]:
    """The same by definition, for every rank."""
    ranks = range(world_size)
    X = np.stack([held(r).numpy() for r in ranks])  # (ranks, numbers)
    parts = [np.array_split(x, world_size) for x in X]
    total, joined = X.sum(0), np.concatenate([X[r, : r + 1] for r in ranks])
    found = []
    for r in ranks:
        mine = [total, X.max(0), np.array_split(total, world_size)[r], joined]
        mine += [np.concatenate([p[r] for p in parts]), X[r - 1]]
        for root in ranks:
            mine += [X[root], parts[root][r]]
            mine += [X.flatten(), total] if r == root else [X[0, :0], X[0, :0]]
        found.append([y.tolist() for y in mine])
    return found
