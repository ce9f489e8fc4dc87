"""Hierarchical: sum inside each node of g ranks first, so that each sends one g-th of the bytes over the slow links.

Ring reduce-scatter inside the node, ring all-reduce of this rank's chunk with the ranks of the same position in other
nodes, ring all-gather inside. Goyal et al. 2017, "Accurate, large minibatch SGD", section 4; Horovod's hierarchical
all-reduce. Bytes per rank with g ranks per node and k nodes: 2 (g-1)/g S inside, 2 (k-1)/k S/g between.
"""

from dataclasses import replace

import torch

from ..ranks import comm
from ..ranks.mesh import Axis
from . import ring


def node_size(n: int, node: int | None = None) -> int:
    """How many neighbouring ranks form a node: the smallest divisor of n unless given.

    Raises ValueError for a size that does not divide n.
    """
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    if node is None:
        return divisors[min(1, len(divisors) - 1)]
    if n % node:
        fitting = ", ".join(map(str, divisors))
        raise ValueError(
            f"{n} ranks cannot be split into nodes of {node} ({n} % {node} = {n % node}). Use {fitting}."
        )
    return node


def part(axis: Axis, positions: range) -> Axis:
    """Some positions of an axis as an axis of its own; messages need no other group."""
    return replace(axis, ranks=tuple(axis.ranks[p] for p in positions), rank=positions.index(axis.rank))


def all_reduce(x, axis: Axis, node: int | None = None):
    """The sum over the axis on every rank; `node` neighbouring ranks share fast links."""
    node = node_size(axis.size, node)
    first = axis.rank // node * node
    inside = part(axis, range(first, first + node))
    across = part(axis, range(axis.rank % node, axis.size, node))
    mine = ring.all_reduce(ring.reduce_scatter(x.reshape(-1), inside), across)
    return torch.cat(ring.all_gather(mine, inside, comm.split_sizes(x.numel(), node))).view(x.shape)
