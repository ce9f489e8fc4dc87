"""Recursive doubling: in round k partners 2^k apart exchange their sums; after log2 n rounds every rank has the total.

Thakur, Rabenseifner & Gropp 2005, section 4.5. For small tensors: the fewest rounds. If n is not a power of two, the
surplus ranks give their tensor to a neighbour first and get the sum last.
Bytes per rank: log2(n) S. Time log2(n) (alpha + S beta), and two rounds more if n is not a power of two.
"""

from ..ranks import comm
from ..ranks.mesh import Axis


def power_below(n: int) -> int:
    """The largest power of two that is not larger than n."""
    return 1 << (n.bit_length() - 1)


def swap(x, axis: Axis, partner: int, like=None):
    """Send x to the partner and return the partner's."""
    going = comm.isend(x, axis, partner)
    coming = comm.irecv(x if like is None else like, axis, partner).wait()
    going.wait()
    return coming


def fold(x, axis: Axis, power: int):
    """Add each surplus rank's tensor to that of its partner below `power`; returns this rank's tensor."""
    if axis.rank >= power:
        comm.send(x, axis, axis.rank - power)
    elif axis.rank + power < axis.size:
        return x + comm.recv(x, axis, axis.rank + power)
    return x.clone()


def unfold(total, axis: Axis, power: int):
    """Send the sum to the surplus ranks."""
    if axis.rank >= power:
        return comm.recv(total, axis, axis.rank - power)
    if axis.rank + power < axis.size:
        comm.send(total, axis, axis.rank + power)
    return total


def all_reduce(x, axis: Axis):
    """The sum over the axis on every rank."""
    power = power_below(axis.size)
    total, distance = fold(x, axis, power), 1
    while axis.rank < power and distance < power:
        total = total + swap(total, axis, axis.rank ^ distance)
        distance *= 2
    return unfold(total, axis, power)
