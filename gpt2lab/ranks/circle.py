"""Ranks that wait in a circle: found on the board from who waits for whom, long before a timeout.

A rank that is blocked in a call needs every peer that has not begun its side of that call. Each rank counts on the
board how many calls it has begun on every channel (a group, or one direction of a pair), so "not begun" is exact:
data that is still on its way never looks like a missing call. A blocked rank begins nothing, so ranks that need each
other in a circle wait for ever.
"""

import re

from gpt2lab.ranks.board import Board, Entry

PATIENCE = 0.5  # seconds that every rank of a circle has been in its call; only guards against reading while it changes
EVERYONE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def needs(board: Board, entry: Entry, now: float) -> list[int]:
    """The ranks without whose call this rank cannot go on; none where that is not certain."""
    if not entry.since or now - entry.since < PATIENCE or not entry.channel:
        return []
    if entry.op not in ("send", "recv") and not _needs_everyone(entry):
        return []
    begun = {peer: board.begun(peer, entry.channel) for peer in entry.peers if peer != entry.rank}
    return [peer for peer, count in begun.items() if count is not None and count < entry.number]


def find(board: Board, waiting: list[int], now: float) -> list[int]:
    """The ranks of a circle in the order of their waiting, from its lowest rank; empty where there is none."""
    looks = []
    for _ in range(2):  # a look that meets a change half made differs from the next
        entries = {rank: board.read(rank) for rank in waiting}
        found = _shortest({rank: needs(board, entry, now) for rank, entry in entries.items()})
        looks.append([entries[rank] for rank in found])
    return found if looks[0] == looks[1] else []


def shown(circle: list[int]) -> str:
    """`0 -> 1 -> 2 -> 0`."""
    return " -> ".join(map(str, [*circle, *circle[:1]]))


def _needs_everyone(entry: Entry) -> bool:
    """Whether the call is over only when all ranks have made it; unsure where some part of it is empty."""
    return entry.op in EVERYONE and not re.search(r"(?<!dim )\b0\b", entry.detail)


def _shortest(edges: dict[int, list[int]]) -> list[int]:
    """The shortest circle in a graph; of several the one with the lowest first rank."""
    circles = []
    for start in sorted(edges):
        paths, seen = [[start]], {start}
        while paths:
            path = paths.pop(0)
            following = edges.get(path[-1], [])
            if start in following:
                circles.append(path)
                break
            paths += [[*path, rank] for rank in following if rank not in seen]
            seen.update(following)
    return min(circles, key=len, default=[])
