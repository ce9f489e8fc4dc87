"""Bytes per class of link: what this rank sent to its own node and what it sent to others, from the log of calls."""

from collections.abc import Iterable

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


def by_class(log: Iterable[Event], mesh: Mesh, node: int, others: Iterable[Axis] = ()) -> dict:
    """{(axis, class): bytes} of this rank, where `node` neighbouring ranks share a node.

    `others` are axes in the log that are not the mesh's own, as the ties of a pipeline.
    """
    axes = {a.name: a for a in (*mesh.all_axes(), *(a for a in others if a is not None))}
    found: dict[tuple[str, str], float] = {}
    for event in log:
        if not event.bytes:
            continue
        targets = receivers(event.op, axes[event.axis])
        for target in targets:
            key = event.axis, INSIDE if target // node == mesh.rank // node else BETWEEN
            found[key] = found.get(key, 0) + event.bytes / len(targets)
    return found
