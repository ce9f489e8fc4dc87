"""What this rank has sent: a log of calls, and how many bytes and messages each kind of call costs.

The costs are those of the bandwidth-optimal algorithm (a ring; Patarasuk & Yuan 2009), in exact integers: n ranks,
S bytes of the whole tensor, c_r bytes of rank r's chunk (sizes as `tensor_split` gives them). They are a property of
the call, whatever algorithm the backend uses underneath.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One call: what this rank sent (bytes, messages) over which axis, from start to end in seconds.

    `ended` is a number, or the time of a GPU, which becomes one when somebody asks for the `end`.

    `targets` are (global rank, bytes) of what it sent. `ring` holds the global ranks of a collective in which every
    rank sends to its right neighbour; it is empty for direct messages. `pair` is (source, target) of a message.
    """

    op: str
    axis: str
    bytes: int
    messages: int
    start: float
    ended: float
    targets: tuple[tuple[int, int], ...] = ()
    ring: tuple[int, ...] = ()
    pair: tuple[int, int] | None = None

    @property
    def end(self) -> float:
        """When it was over."""
        return float(self.ended)


LATEST = 50_000  # calls, or spans, that a rank keeps: some 20 MB, however long it runs
log: deque[Event] = deque(maxlen=LATEST)


def clear_log() -> None:
    """Forget the events so far."""
    log.clear()


def traffic() -> dict[tuple[str, str], tuple[int, int, int]]:
    """(calls, bytes, messages) sent by this rank, by (operation, axis).

    Raises RuntimeError where the log is full, because it has forgotten older calls.
    """
    if len(log) == LATEST:
        raise RuntimeError(
            f"The log keeps the latest {LATEST:,} calls and is full. Use clear_log() just before what you count."
        )
    table = defaultdict(lambda: (0, 0, 0))
    for e in log:
        calls, size, messages = table[e.op, e.axis]
        table[e.op, e.axis] = (calls + 1, size + e.bytes, messages + e.messages)
    return dict(table)


def split_sizes(total: int, parts: int) -> list[int]:
    """The lengths that `tensor_split` makes: they differ by at most one, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def all_gather_cost(chunks: Sequence[int], rank: int) -> tuple[int, int]:
    """(bytes, messages): this rank sends every chunk except its right neighbour's own."""
    return sum(chunks) - chunks[(rank + 1) % len(chunks)], len(chunks) - 1


def reduce_scatter_cost(chunks: Sequence[int], rank: int) -> tuple[int, int]:
    """(bytes, messages): this rank sends partial sums of every chunk except its own."""
    return sum(chunks) - chunks[rank], len(chunks) - 1


def all_reduce_cost(chunks: Sequence[int], rank: int) -> tuple[int, int]:
    """(bytes, messages) of a reduce-scatter and an all-gather: 2 (n-1)/n S where the chunks are equal."""
    first, second = reduce_scatter_cost(chunks, rank), all_gather_cost(chunks, rank)
    return first[0] + second[0], first[1] + second[1]


RING = {"all_gather": all_gather_cost, "reduce_scatter": reduce_scatter_cost, "all_reduce": all_reduce_cost}


def chain_cost(size: int, is_end: bool) -> tuple[int, int]:
    """(bytes, messages) of a broadcast or reduce along a chain: S, but none for the rank at the chain's end."""
    return (0, 0) if is_end else (size, 1)


def direct_cost(parts: Sequence[int], rank: int) -> tuple[int, int]:
    """(bytes, messages) that `rank`, -1 the last, sends when part p goes straight to rank p; no message if empty."""
    leaving = [size for peer, size in enumerate(parts) if peer != rank % len(parts) and size]
    return sum(leaving), len(leaving)


def direct_sends(parts: Sequence[int], axis) -> tuple[tuple[int, int], ...]:
    """(global rank, bytes) of the same messages from this rank of an axis."""
    targets = zip(axis.ranks, parts, strict=True)
    return tuple((rank, size) for rank, size in targets if rank != axis.ranks[axis.rank] and size)
