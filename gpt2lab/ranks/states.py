"""What every rank is doing, in words: read from the board when a run has failed."""

from gpt2lab.ranks.board import Board, Entry
from gpt2lab.ranks.failure import place


def describe(board: Board, ranks, returned, now: float, stack=None) -> dict[int, str]:
    """For each rank what it does: its call, for how long and for whom.

    `returned` are the ranks that have answered already; `stack(rank)` tells where the code of a rank outside any
    call is now.
    """
    entries = {rank: board.read(rank) for rank in ranks}
    states = {}
    for rank, entry in entries.items():
        call = f"{entry.op} #{entry.number} on axis {entry.axis!r}"
        if rank in returned:
            states[rank] = "has returned from the function already"
        elif entry.since:
            absent = [str(p) for p in entry.peers if p != rank and not _has_come(board, entries[p], entry)]
            whom = f" for rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}" if absent else ""
            call = f"{call} {entry.detail}".rstrip()
            states[rank] = f"waits {now - entry.since:.1f} s in {call}{whom}; {place(entry.where)}"
        else:
            where = f": it {stack(rank)}" if stack else ""
            states[rank] = f"is in no communication call{f' (last {call})' if entry.op else ''}{where}"
    return states


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
