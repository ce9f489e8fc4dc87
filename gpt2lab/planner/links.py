"""The alpha-beta model: a message of S bytes takes latency + S / bandwidth; collectives are sums of messages.

Hockney 1994 for a message; Patarasuk & Yuan 2009 and Thakur, Rabenseifner & Gropp 2005 for the algorithms.
n ranks, S bytes in all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """A way between two ranks: latency in seconds, bandwidth in bytes per second."""

    latency: float
    bandwidth: float

    def time(self, size: float, messages: float = 1) -> float:
        """Seconds for `messages` messages one after the other that carry `size` bytes together."""
        return messages * self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Links:
    """The links of a machine: `inside` a node of `node` neighbouring ranks, `between` nodes; `pairs` are exceptions."""

    between: Link
    inside: Link | None = None
    node: int = 1
    pairs: dict[tuple[int, int], Link] = field(default_factory=dict)

    @classmethod
    def placed(cls, nodes: Sequence[int], inside: Link, between: Link) -> "Links":
        """The links of ranks that are dealt to nodes in any way: rank r lives in `nodes[r]`."""
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
    """ceil(log2 n), the depth of a binary tree over n ranks."""
    return math.ceil(math.log2(n)) if n > 1 else 0


def _naive(n, size, link):
    return 2 * (n - 1) * link.time(size)


def _ring(n, size, link):
    return link.time(2 * (n - 1) / n * size, 2 * (n - 1))


def _tree(n, size, link):
    return 2 * rounds(n) * link.time(size)


def _double_tree(n, size, link):
    # each half travels its own pipelined tree, so every rank sends about S up and S down in all
    return link.time(2 * size, 2 * rounds(n)) if n > 1 else 0.0


def _doubling(n, size, link):
    extra = 0 if n & (n - 1) == 0 else 2  # other sizes than powers of two fold their surplus ranks in and out
    return (int(math.log2(n)) + extra) * link.time(size)


def _rabenseifner(n, size, link):
    power = 1 << (n.bit_length() - 1)
    time = link.time(2 * (power - 1) / power * size, 2 * int(math.log2(power)))
    return time + (0 if power == n else 2 * link.time(size))


ALL_REDUCE = {
    "naive": _naive,
    "ring": _ring,
    "tree": _tree,
    "double tree": _double_tree,
    "recursive doubling": _doubling,
    "rabenseifner": _rabenseifner,
}


def all_reduce_time(algorithm: str, n: int, size: float, link: Link) -> float:
    """Seconds that an all-reduce of `size` bytes takes over n ranks by the named algorithm of ALL_REDUCE."""
    if algorithm not in ALL_REDUCE:
        raise ValueError(f"no algorithm is called {algorithm!r}. Choose one of: {', '.join(ALL_REDUCE)}.")
    return ALL_REDUCE[algorithm](n, size, link) if n > 1 else 0.0


def hierarchical_time(n: int, node: int, size: float, inside: Link, between: Link) -> float:
    """Ring reduce-scatter inside nodes, ring all-reduce of the chunks between them, ring all-gather inside."""
    half = inside.time((node - 1) / node * size, node - 1) if node > 1 else 0.0
    return 2 * half + all_reduce_time("ring", n // node, size / node, between)


def crossing(n: int, link: Link, first: str = "tree", second: str = "ring") -> float:
    """The size in bytes from which `second` is faster than `first` (inf: never), for linear costs."""
    slope = lambda a: all_reduce_time(a, n, 1.0, Link(0.0, 1.0))
    start = lambda a: all_reduce_time(a, n, 0.0, Link(1.0, 1.0))
    steeper = slope(first) - slope(second)
    size = (start(second) - start(first)) * link.latency * link.bandwidth
    return max(size / steeper, 0.0) if steeper > 0 else math.inf


BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}


def bandwidths(op: str, n: int, size: float, seconds: float) -> tuple[float, float]:
    """(algorithm, bus) bandwidth in bytes per second by nccl-tests' definitions; `size` is the whole array's bytes."""
    algorithm = size / seconds
    return algorithm, algorithm * BUS[op](n)
