"""The path of a block of keys around the ranks: a ring, or a ring of rings. Plain Python: no torch, no ranks."""

import math
from dataclasses import dataclass
from functools import lru_cache

from .layouts import TokenLayout, contributors


@dataclass(frozen=True)
class RingPath:
    """The path of every block around N ranks: `inner - 1` hops inside a machine of `inner` ranks, then one out of it.

    One machine of N is the plain ring; with more it is a double ring (Gu et al. 2024, LoongTrain).
    """

    ranks: int
    inner: int

    def at(self, source: int, hops: int) -> int:
        """Where the block of `source` is after so many hops."""
        return self._moved(source, hops // self.inner, hops - hops // self.inner)

    def source(self, rank: int, hops: int) -> int:
        """Whose block a rank holds after so many hops."""
        return self._moved(rank, -(hops // self.inner), -(hops - hops // self.inner))

    def _moved(self, rank: int, machines: int, places: int) -> int:
        machine, place = divmod(rank, self.inner)
        return (machine + machines) * self.inner % self.ranks + (place + places) % self.inner


def ring_path(exchange: str, ranks: int) -> RingPath:
    """The path of exchange `ring` or `double-ring`, whose machines hold the largest divisor of N that is <= sqrt(N)."""
    inner = max(n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0)
    return RingPath(ranks, inner if exchange == "double-ring" else ranks)


@lru_cache(maxsize=256)
def reach(table: TokenLayout, window: int | None = None, way: RingPath | None = None) -> tuple[int, ...]:
    """How many hops each rank's keys are sent in a ring: only as far as a rank needs them.

    N-1 for every rank in an interleaved or zigzag layout; N-1-r in a contiguous one on the plain ring, as only later
    ranks need rank r.
    """
    n, way = table.ranks, way or ring_path("ring", table.ranks)
    needed = lambda s, hops: way.at(s, hops) in contributors(table, s, window)
    return tuple(max((h for h in range(n) if needed(s, h)), default=0) for s in range(n))
