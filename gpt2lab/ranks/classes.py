"""Bytes per class of link, inside this rank's node and between nodes, and their price, from the log of calls."""

from collections.abc import Iterable, Sequence

from ..planner.links import Links
from .mesh import Axis, Mesh
from .traffic import Event

INSIDE, BETWEEN = "inside a node", "between nodes"


def receivers(op: str, axis: Axis) -> list[int]:
    """The global ranks to which a call on an axis sends, each with the same share of its bytes.

    Rings send to the right neighbour; messages of a pipeline go as much back as forth; all-to-all goes to all.
    """
    right, left = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
    if op == "all_to_all":
        return list(axis.peers)
    if op == "send":
        first, last = axis.rank == 0, axis.rank == axis.size - 1
        return [right] if first else [left] if last else [left, right]
    return [right]


def by_class(
    log: Iterable[Event], mesh: Mesh, node: int | Sequence[int], others: Iterable[Axis] = ()
) -> dict:
    """{(axis, class): bytes} of this rank. `node` neighbouring ranks share a node, or rank r lives in `node[r]`.

    `others` are axes in the log that are not the mesh's own, as the ties of a pipeline.
    """
    home = (lambda rank: rank // node) if isinstance(node, int) else node.__getitem__
    axes = _by_name(mesh, others)
    found: dict[tuple[str, str], float] = {}
    for event in log:
        if not event.bytes:
            continue
        targets = receivers(event.op, axes[event.axis])
        for target in targets:
            key = event.axis, INSIDE if home(target) == home(mesh.rank) else BETWEEN
            found[key] = found.get(key, 0) + event.bytes / len(targets)
    return found


def total(found: Iterable[dict]) -> dict:
    """The sum of all ranks' bytes, by (axis, class)."""
    sums: dict[tuple[str, str], float] = {}
    for mine in found:
        for key, size in mine.items():
            sums[key] = sums.get(key, 0) + size
    return sums


def price(log: Iterable[Event], mesh: Mesh, links: Links, others: Iterable[Axis] = ()) -> float:
    """Seconds that this rank's calls take on these links, one after the other, by the alpha-beta model.

    The slowest edge of a call's group decides. Where messages overlap with work or each other, it is an upper bound.
    """
    axes = _by_name(mesh, others)
    return sum(links.ring_time(axes[e.axis].ranks, e.bytes, e.messages) for e in log)


def _by_name(mesh: Mesh, others: Iterable[Axis]) -> dict[str, Axis]:
    return {a.name: a for a in (*mesh.all_axes(), *(a for a in others if a is not None))}
