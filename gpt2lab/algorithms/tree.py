"""Binomial tree: in round k ranks 2^k apart communicate; log2 n rounds sum to rank 0, log2 n rounds broadcast.

Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH", section 4.
Bytes per rank: at most S up, and S for each child down. Time 2 ceil(log2 n)(alpha + S beta).
"""

from ..ranks import comm
from ..ranks.mesh import Axis


def parent(rank: int) -> int:
    """The rank without its lowest set bit."""
    return rank & (rank - 1)


def children(rank: int, n: int) -> list[int]:
    """The ranks whose parent this is, nearest first: rank + 1, + 2, + 4 ... below its own lowest set bit."""
    found, distance = [], 1
    while rank + distance < n and not rank & distance:
        found.append(rank + distance)
        distance *= 2
    return found


def reduce(x, axis: Axis):
    """The sum over the axis on position 0; on other ranks the sum of their own subtree."""
    total = x.clone()
    for child in children(axis.rank, axis.size):
        total += comm.recv(x, axis, child)
    if axis.rank:
        comm.send(total, axis, parent(axis.rank))
    return total


def broadcast(x, axis: Axis):
    """The tensor of position 0 on every rank; it is sent to the largest subtree first."""
    if axis.rank:
        x = comm.recv(x, axis, parent(axis.rank))
    for child in reversed(children(axis.rank, axis.size)):
        comm.send(x, axis, child)
    return x


def all_reduce(x, axis: Axis):
    """The sum over the axis on every rank."""
    return broadcast(reduce(x, axis), axis)
