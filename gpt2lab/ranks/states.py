"""What every rank is doing, in words: read from the board when a run has failed."""

from gpt2lab.ranks.board import Board, Entry
from gpt2lab.ranks.failure import place


def describe(board: Board, ranks, returned, now: float, crew=None) -> dict[int, str]:
    """For each rank what it does: its call, for how long and for whom.

    `returned` are the ranks that have answered already; a `crew` is asked where the code of a rank outside any call is
    now, and whether one inside a call is stopped: that one waits for nobody, and the others for it.
    """
    entries = {rank: board.read(rank) for rank in ranks}
    absent = {  # before anybody is asked for his stack: the signal that asks may end a sleep
        rank: [str(p) for p in entry.peers if p != rank and not _has_come(board, entries[p], entry)]
        for rank, entry in entries.items()
    }
    return {r: _state(e, absent[r], r in returned, now, crew) for r, e in entries.items()}


def _state(entry: Entry, absent: list[str], returned: bool, now: float, crew) -> str:
    call = f"{entry.op} #{entry.number} on axis {entry.axis!r}"
    if returned:
        return "has returned from the function already"
    if entry.since:
        whom = f" for rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}" if absent else ""
        call = f"{call} {entry.detail}".rstrip()
        if crew and (stopped := crew.stopped(entry.rank)):
            return f"{stopped}, in {call}; {place(entry.where)}"
        return f"waits {now - entry.since:.1f} s in {call}{whom}; {place(entry.where)}"
    where = f": it {crew.stack(entry.rank)}" if crew else ""
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
