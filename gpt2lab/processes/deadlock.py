"""Ranks that wait in a circle, found long before a timeout; and the state of every rank in words.

A rank that is blocked in a call needs every peer that has not begun its side of that call. Each rank counts on the
board how many calls it has begun on every channel (a group, or one direction of a pair), so "not begun" is exact: data
in transit never looks like a missing call. A blocked rank begins no other call, so ranks that need each other in a
circle wait forever.
"""

import re

from .failure import with_source
from .status_board import Activity, Board

PATIENCE = 0.5  # seconds that a rank must have been in its call before it counts as blocked
EVERYONE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def needs(board: Board, entry: Activity, now: float) -> list[int]:
    """The ranks whose call this rank needs before it can continue; empty where that is not certain."""
    if not entry.since or now - entry.since < PATIENCE or not entry.channel:
        return []
    # a collective that has an empty part, or may have one, may not need all ranks
    of_all = entry.op in EVERYONE and not re.search(r"(?<!dim )\b0\b|\.\.\.", entry.detail)
    if entry.op not in ("send", "recv") and not of_all:
        return []
    begun = {peer: board.begun(peer, entry.channel) for peer in entry.peers if peer != entry.rank}
    return [peer for peer, count in begun.items() if count is not None and count < entry.number]


def find_circle(board: Board, waiting: list[int], now: float) -> list[int]:
    """The ranks of a circle, each followed by one that it needs, from the lowest; empty where there is none."""
    readings = []
    for _ in range(2):  # the board may change while it is read: two equal readings are consistent
        entries = {rank: board.read(rank) for rank in waiting}
        found = _shortest({rank: needs(board, entry, now) for rank, entry in entries.items()})
        readings.append([entries[rank] for rank in found])
    return found if readings[0] == readings[1] else []


def shown(circle: list[int]) -> str:
    """`0 -> 1 -> 2 -> 0`."""
    return " -> ".join(map(str, [*circle, *circle[:1]]))


def _shortest(edges: dict[int, list[int]]) -> list[int]:
    """The shortest circle in a graph; of equally short ones that with the lowest first rank."""
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


def states(board: Board, ranks, returned, now: float, pool=None) -> dict[int, str]:
    """What each rank is doing, in words: its call, how long it has waited, and for which ranks.

    `returned` are the ranks that have returned already. With a `pool`, the text also says at which line a rank outside
    any call is, and whether a rank inside a call is stopped by a signal or does something else than wait.
    """
    entries = {rank: board.read(rank) for rank in ranks}
    absent = {
        rank: [str(p) for p in entry.peers if p != rank and not _has_come(board, entries[p], entry)]
        for rank, entry in entries.items()
    }
    # Both before a rank outside all calls is asked for its stack: that signal may end a sleep, and much may follow.
    in_calls = [r for r, e in entries.items() if e.since and r not in returned]
    inside = {r: pool.inside(r, bool(entries[r].channel)) for r in in_calls if pool}
    return {r: _state(e, absent[r], inside.get(r), r in returned, now, pool) for r, e in entries.items()}


def _state(entry: Activity, absent: list[str], inside: str | None, returned: bool, now: float, pool) -> str:
    call = f"{entry.op} #{entry.number} on axis {entry.axis!r}"
    if returned:
        return "has returned from the function already"
    if entry.since:
        ranks = f" for rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}" if absent else ""
        call = f"{call} {entry.detail}".rstrip()
        if inside:
            return f"{inside}, in {call}; {with_source(entry.where)}"
        return f"waits {now - entry.since:.1f} s in {call}{ranks}; {with_source(entry.where)}"
    where = f": it {pool.stack(entry.rank)}" if pool else ""
    return f"is in no communication call{f' (last {call})' if entry.op else ''}{where}"


def _has_come(board: Board, peer: Activity, call: Activity) -> bool:
    """Whether `peer` has begun its side of a call: the same collective, or the counterpart of a message."""
    begun = board.begun(peer.rank, call.channel) if call.channel else None
    if begun is not None:
        return begun >= call.number
    if call.op in ("send", "recv"):
        other = "recv" if call.op == "send" else "send"
        matching = (peer.op, peer.number) == (other, call.number) and call.rank in peer.peers
    else:
        matching = (peer.op, peer.axis, peer.number) == (call.op, call.axis, call.number)
    return bool(peer.since) and matching
