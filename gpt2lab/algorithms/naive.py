"""All ranks send to rank 0, which adds up and sends the sum back: simple, but rank 0 is the bottleneck.

Bytes per rank: S; rank 0 (n-1) S. Time 2 (n-1)(alpha + S beta).
"""

from ..ranks import comm
from ..ranks.mesh import Axis


def all_reduce(x, axis: Axis):
    """The sum over the axis on every rank."""
    if axis.rank:
        comm.send(x, axis, 0)
        return comm.recv(x, axis, 0)
    total = x.clone()
    for peer in range(1, axis.size):
        total += comm.recv(x, axis, peer)
    for peer in range(1, axis.size):
        comm.send(total, axis, peer)
    return total
