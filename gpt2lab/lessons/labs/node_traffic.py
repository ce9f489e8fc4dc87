"""Bytes inside a node and between nodes, and the time that they take, from the log of calls."""

from collections import Counter
from collections.abc import Iterable, Sequence

from ...machine.links import Network
from ...ranks.traffic import Event

INSIDE, BETWEEN = "inside a node", "between nodes"


def by_class(log: Iterable[Event], rank: int, node: int | Sequence[int]) -> dict[tuple[str, str], int]:
    """{(axis, class): bytes} that this rank sent; `node` neighbouring ranks share a node, or rank r is in `node[r]`."""
    home = (lambda r: r // node) if isinstance(node, int) else node.__getitem__
    found: dict[tuple[str, str], int] = {}
    for event in log:
        for target, size in event.targets:
            key = event.axis, INSIDE if home(target) == home(rank) else BETWEEN
            found[key] = found.get(key, 0) + size
    return found


def total(found: Iterable[dict]) -> dict[tuple[str, str], int]:
    """The sum of all ranks' bytes, by (axis, class)."""
    return sum(map(Counter, found), Counter())


def price(log: Iterable[Event], rank: int, network: Network) -> float:
    """Seconds that this rank's calls take on this network, one after the other, by the alpha-beta model.

    A ring is as fast as its slowest edge, a direct message as its own link. A step can take less time, where messages
    overlap with work or with each other, and more, where this rank waits for others.
    """
    return sum(_seconds(event, rank, network) for event in log)


def _seconds(event: Event, rank: int, network: Network) -> float:
    if event.ring:
        return network.ring_time(event.ring, event.bytes, event.messages)
    return sum(network.link(rank, target).time(size) for target, size in event.targets)
