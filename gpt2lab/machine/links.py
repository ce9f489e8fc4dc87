"""The alpha-beta model: a message of S bytes takes latency + S / bandwidth; collectives are sums of messages.

Hockney 1994 for a message; Patarasuk & Yuan 2009 and Thakur, Rabenseifner & Gropp 2005 for the algorithms.
n ranks, S bytes in all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .arguments import MORE, checked


@checked(latency=0, bandwidth=(MORE, math.inf))
@dataclass(frozen=True)
class Link:
    """A connection between two ranks: latency in seconds, bandwidth in bytes per second."""

    latency: float
    bandwidth: float

    def time(self, size: float, messages: float = 1) -> float:
        """Seconds for `messages` messages one after the other that carry `size` bytes together."""
        return messages * self.latency + size / self.bandwidth


@checked(node=1)
@dataclass(frozen=True)
class Network:
    """The links of a machine: `inside` a node of `node` neighbouring ranks, `between` nodes; `pairs` are exceptions."""

    between: Link
    inside: Link | None = None
    node: int = 1
    pairs: dict[tuple[int, int], Link] = field(default_factory=dict)

    @classmethod
    def placed(cls, nodes: Sequence[int], inside: Link, between: Link) -> "Network":
        """The network of ranks placed on nodes in any way: rank r is on `nodes[r]`."""
        ranks = range(len(nodes))
        return cls(between, pairs={(a, b): inside for a in ranks for b in ranks if nodes[a] == nodes[b]})

    def link(self, source: int, target: int) -> Link:
        """The link from one global rank to another."""
        if (source, target) in self.pairs:
            return self.pairs[source, target]
        same = source // self.node == target // self.node
        return self.inside if same and self.inside is not None else self.between

    def ring_time(self, ranks: Sequence[int], size: float, hops: float) -> float:
        """Seconds of `hops` steps around a ring in which each rank sends `size` bytes: its slowest edge decides."""
        edges = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
        return max(self.link(a, b).time(size, hops) for a, b in edges)


def rounds(n: int) -> int:
    """The depth of a binary tree over n ranks: ceil(log2 n)."""
    return math.ceil(math.log2(n)) if n > 1 else 0


def _double_tree(n, size, chunks=4):
    # half of the tensor as `chunks` through each tree of depth log2 n: in a step a rank receives a chunk from each of
    # two children, and the last chunk starts chunks - 1 steps after the first; then the same down
    steps, children = 2 * (n.bit_length() - 1 + chunks - 1), min(2, n - 1)
    return steps, steps * children * size / (2 * chunks)


def _doubling(n, size):
    # if n is not a power of two, surplus ranks send first and receive last
    fold = 0 if n & (n - 1) == 0 else 2
    steps = n.bit_length() - 1 + fold
    return steps, steps * size


def _rabenseifner(n, size):
    power = 1 << (n.bit_length() - 1)
    fold = 0 if power == n else 2
    return 2 * (power.bit_length() - 1) + fold, (2 * (power - 1) / power + fold) * size


ALL_REDUCE = {
    "naive": lambda n, size: (2 * (n - 1), 2 * (n - 1) * size),
    "ring": lambda n, size: (2 * (n - 1), 2 * (n - 1) / n * size),
    "tree": lambda n, size: (2 * rounds(n), 2 * rounds(n) * size),
    "double tree": _double_tree,
    "recursive doubling": _doubling,
    "rabenseifner": _rabenseifner,
}


def longest_path(algorithm: str, n: int, size: float) -> tuple[int, float]:
    """(messages, bytes) that follow each other: an all-reduce takes messages x latency + bytes / bandwidth.

    They are the longest path through the named algorithm of ALL_REDUCE; messages in parallel to them add no time.
    """
    if algorithm not in ALL_REDUCE:
        raise ValueError(f"No algorithm is called {algorithm!r}. Use one of: {', '.join(ALL_REDUCE)}.")
    return ALL_REDUCE[algorithm](n, size) if n > 1 else (0, 0.0)


@checked(n=1, size=0)
def all_reduce_time(algorithm: str, n: int, size: float, link: Link) -> float:
    """Seconds that an all-reduce of `size` bytes takes over n ranks by the named algorithm of ALL_REDUCE."""
    messages, sequential = longest_path(algorithm, n, size)
    return link.time(sequential, messages)


@checked(n=1)
def crossing(n: int, link: Link, first: str = "tree", second: str = "ring") -> float:
    """The size in bytes from which `second` is faster than `first` (inf: never), for linear costs."""
    (few, steep), (many, flat) = (longest_path(name, n, 1.0) for name in (first, second))
    size = (many - few) * link.latency * link.bandwidth
    return max(size / (steep - flat), 0.0) if steep > flat else math.inf


BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}


@checked(n=1, size=0, seconds=MORE)
def bandwidths(op: str, n: int, size: float, seconds: float) -> tuple[float, float]:
    """(algorithm, bus) bandwidth in bytes per second by nccl-tests' definitions; `size` is the whole array's bytes."""
    if op not in BUS:
        raise ValueError(f"No bus bandwidth is known for {op!r}. Use one of: {', '.join(BUS)}.")
    algorithm = size / seconds
    return algorithm, algorithm * BUS[op](n)
