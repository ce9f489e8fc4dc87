"""Ranks that wait in a circle, found long before a timeout; and what every rank was doing, in words.

A rank that is blocked in a call needs every peer that has not begun its side of that call. Each rank counts on the
board how many calls it has begun on every channel (a group, or one direction of a pair), so "not begun" is exact:
data that is still on its way never looks like a missing call. A blocked rank begins nothing, so ranks that need each
other in a circle wait for ever.
"""

import re

from .failure import place
from .status_board import Board, Entry

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


def describe(board: Board, ranks, returned, now: float, pool=None) -> dict[int, str]:
    """For each rank what it does: its call, for how long and for whom.

    `returned` are the ranks that have answered already; a `pool` is asked where the code of a rank outside any call is
    now, and whether one inside a call is stopped: that one waits for nobody, and the others for it.
    """
    entries = {rank: board.read(rank) for rank in ranks}
    absent = {  # before anybody is asked for his stack: the signal that asks may end a sleep
        rank: [str(p) for p in entry.peers if p != rank and not _has_come(board, entries[p], entry)]
        for rank, entry in entries.items()
    }
    return {r: _state(e, absent[r], r in returned, now, pool) for r, e in entries.items()}


def _state(entry: Entry, absent: list[str], returned: bool, now: float, pool) -> str:
    call = f"{entry.op} #{entry.number} on axis {entry.axis!r}"
    if returned:
        return "has returned from the function already"
    if entry.since:
        whom = f" for rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}" if absent else ""
        call = f"{call} {entry.detail}".rstrip()
        if pool and (stopped := pool.stopped(entry.rank)):
            return f"{stopped}, in {call}; {place(entry.where)}"
        return f"waits {now - entry.since:.1f} s in {call}{whom}; {place(entry.where)}"
    where = f": it {pool.stack(entry.rank)}" if pool else ""
    return f"is in no communication call{f' (last {call})' if entry.op else ''}{where}"


def _has_come(board: Board, peer: Entry, call: Entry) -> bool:
    """Whether a rank has begun its side of another's call: the same collective, or the counterpart of a message."""
    begun = board.begun(peer.rank, call.channel) if call.channel else None
    if begun is not None:
        return begun >= call.number
    if call.op in ("send", "recv"):
        other = "recv" if call.op == "send" else "send"
        matching = (peer.op, peer.number) == (other, call.number) and call.rank in peer.peers
    else:
        matching = (peer.op, peer.axis, peer.number) == (call.op, call.axis, call.number)
    return bool(peer.since) and matching
