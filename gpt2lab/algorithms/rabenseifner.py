"""Rabenseifner: recursive halving scatters the sum in log2 n rounds, recursive doubling gathers it in log2 n more.

Rabenseifner 2004, "Optimization of collective reduction operations"; Thakur et al. 2005, section 4.5.
As few bytes as the ring and as few rounds as a tree, if n is a power of two; another n as in `doubling`.
Bytes per rank: 2 (n-1)/n S. Time 2 log2(n) alpha + 2 (n-1)/n S beta.
"""

from ..ranks.mesh import Axis
from .doubling import fold, power_below, swap, unfold


def halves(low: int, high: int, rank: int, distance: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The part of low:high that this rank keeps, and the part that goes to the partner `distance` away."""
    middle = (low + high) // 2
    lower, upper = (low, middle), (middle, high)
    return (upper, lower) if rank & distance else (lower, upper)


def plan(power: int, rank: int, count: int) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
    """(partner's distance, kept range, given range) of every halving round, the farthest partner first."""
    rounds, kept, distance = [], (0, count), power // 2
    while distance:
        kept, given = halves(*kept, rank, distance)
        rounds.append((distance, kept, given))
        distance //= 2
    return rounds


def all_reduce(x, axis: Axis):
    """The sum over the axis on every rank."""
    power = power_below(axis.size)
    total = fold(x.reshape(-1), axis, power)
    if axis.rank < power:
        rounds = plan(power, axis.rank, total.numel())
        for distance, kept, given in rounds:
            mine = total[slice(*kept)]
            mine += swap(total[slice(*given)], axis, axis.rank ^ distance, mine)
        for distance, kept, given in reversed(rounds):
            theirs = total[slice(*given)]
            theirs.copy_(swap(total[slice(*kept)], axis, axis.rank ^ distance, theirs))
    return unfold(total, axis, power).view(x.shape)
