"""Which parts of the (query, key) square attention computes: strips under a mask, or pieces that need none.

Plain Python over ascending positions. What no part covers is never computed: causal attention skips, it does not mask.
"""

import bisect
from functools import lru_cache
from itertools import pairwise


def _step(positions: tuple[int, ...]) -> int:
    """The usual distance of neighbours, the smallest; 0 where there are none."""
    return min((b - a for a, b in pairwise(positions)), default=0)


def tiles(positions: tuple[int, ...], tile: int | None = None) -> list[slice]:
    """Cut a rank's rows into runs of at most `tile`, and where positions jump more than usual (zigzag's chunks)."""
    usual, ends, start = _step(positions), [], 0
    for i in range(1, len(positions) + 1):
        if i == len(positions) or positions[i] - positions[i - 1] > usual or (tile and i - start == tile):
            ends.append(slice(start, i))
            start = i
    return ends


@lru_cache(maxsize=1024)
def strips(
    queries: tuple[int, ...], keys: tuple[int, ...], window: int | None = None, tile: int | None = None
):
    """What causal attention touches, a tile of queries at a time: a list of (rows, columns, needs a mask).

    A tile of queries sees keys from its first query's window to its last query; the rest is never computed.
    """
    found = []
    for rows in tiles(queries, tile):
        first, last = queries[rows.start], queries[rows.stop - 1]
        lo = 0 if window is None else bisect.bisect_left(keys, first - window)
        hi = bisect.bisect_right(keys, last)
        if lo < hi:
            whole = keys[hi - 1] <= first and (window is None or keys[lo] >= last - window)
            found.append((rows, slice(lo, hi), not whole))
    return found


def pairs_computed(queries, keys, window: int | None = None, tile: int | None = None) -> int:
    """How many (query, key) pairs `strips` touches; with tile=1 exactly those that are attended to."""
    found = strips(tuple(queries), tuple(keys), window, tile)
    return sum((r.stop - r.start) * (c.stop - c.start) for r, c, _ in found)


@lru_cache(maxsize=1024)
def pieces(queries: tuple[int, ...], keys: tuple[int, ...]):
    """Causal attention as whole rectangles and triangles from the corner: a list of (rows, columns, triangle).

    Within a run, query i has position q + d i and key j has k + d j; so query i sees the keys j <= i + s, where s is
    (q - k) // d. Keys that stand closer than queries are taken as several such progressions. None where neither fits.
    """
    d, e = (_step(positions) for positions in (queries, keys))
    d, e = d or e or 1, e or d or 1  # a single position fits any step
    if d % e:
        return None
    found = []
    for rows in tiles(queries):
        for run in tiles(keys):
            for first in range(run.start, min(run.start + d // e, run.stop)):
                columns = range(first, run.stop, d // e)
                s = (queries[rows.start] - keys[first]) // d
                found += _under_diagonal(range(rows.start, rows.stop), columns, s)
    return found


def _under_diagonal(rows: range, columns: range, s: int):
    """Row i sees the columns j <= i + s: all of the first s, then a triangle."""
    whole, low = columns[: max(s, 0)], rows[max(-s, 0) :]
    corner = columns[max(s, 0) :][: len(low)]
    if whole:
        yield _slice(rows), _slice(whole), False
    if corner:
        yield _slice(low), _slice(corner), True


def _slice(r: range) -> slice:
    return slice(r.start, r.stop, r.step)
