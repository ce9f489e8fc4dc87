"""Collectives on thousands of ranks, message by message: machines, pods whose rails join them, and a spine of switches.

A message waits its link's latency, then its bytes flow; what leaves or reaches a rank at the same time shares its
bandwidth, and what leaves a pod shares the pod's uplinks. A rank sends when what it needs has come. Every message is
counted, and every rank has a clock of its own: arrays, so that 4,096 ranks take a second.

Messages as in `algorithms`, whose live ranks send the same. In-network reduction: Graham et al. 2016, "Scalable
Hierarchical Aggregation Protocol (SHARP)"; rails: Wang et al. 2023, "Rail-only".
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..algorithms.double_tree import trees
from ..machine.arguments import MORE, checked
from ..machine.links import Link, all_reduce_time
from ..machine.patience import patiently

Round = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Messages that go at the same time: who sends, who receives, how many bytes."""

RANKS = (1, 2**20)
"""How many ranks are played: a round has an array of them."""


@checked(machine=1, pod=1, taper=MORE)
@dataclass(frozen=True)
class Fabric:
    """Ranks in machines of `machine`, machines in pods of `pod` ranks.

    Ranks of a pod with the same place in their machines share a switch, their rail; all others meet in the spine, to
    which a pod's uplinks carry 1 / `taper` of what its ranks could send.
    """

    machine: int = 8
    pod: int = 256
    inside: Link = Link(3e-6, 450e9)
    rail: Link = Link(5e-6, 50e9)
    spine: Link = Link(10e-6, 50e9)
    taper: float = 1.0

    def levels(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """What joins two ranks: 0 their machine, 1 a rail, 2 the spine."""
        machine, pod = self.machine, self.pod
        rail = (source % machine == target % machine) & (source // pod == target // pod)
        return np.where(source // machine == target // machine, 0, np.where(rail, 1, 2))

    def links(self, source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(latency, bytes per second) of messages that go at the same time."""
        level = self.levels(source, target)
        links = np.array([(x.latency, x.bandwidth) for x in (self.inside, self.rail, self.spine)])
        latency, bandwidth = links[level].T
        card = level > 0  # a rank's way inside its machine and its network card are two
        busy = np.ones(len(source))
        for one, other in ((source, target), (target, source)):
            ports = 2 * one + card
            busy = np.maximum(busy, np.bincount(ports)[ports])
            leaves = (level == 2) & (one // self.pod != other // self.pod)
            if leaves.any():
                crowd = np.bincount(one[leaves] // self.pod, minlength=one.max() // self.pod + 1)
                crowd = crowd[one // self.pod] * self.taper / self.pod
                busy = np.where(leaves, np.maximum(busy, crowd), busy)
        return latency, bandwidth / busy


@dataclass(frozen=True)
class Counted:
    """What came of a collective: its seconds, and for every rank the messages and bytes it sent."""

    seconds: float
    messages: np.ndarray
    bytes: np.ndarray


@checked(ranks=RANKS, total=0)
def run_rounds(ranks: int, rounds: Iterable[Round], fabric: Fabric, total: int | None = None) -> Counted:
    """Send all messages of `total` rounds, each as soon as its sender has received what came before."""
    clock, messages, sent = np.zeros(ranks), np.zeros(ranks, int), np.zeros(ranks, int)
    before = None
    for source, target, size in patiently(rounds, "rounds of messages", total):
        if before is None or source is not before[0] or target is not before[1]:
            before, (latency, bandwidth) = (source, target), fabric.links(source, target)
        flow = size / bandwidth
        gone = clock[source] + flow
        ends = clock.copy()
        np.maximum.at(ends, source, gone)
        np.maximum.at(ends, target, gone + latency)
        clock = ends
        np.add.at(messages, source, 1)
        np.add.at(sent, source, size)
    return Counted(float(clock.max()), messages, sent)


@checked(size=0, parts=RANKS)
def equal_parts(size: int, parts: int) -> np.ndarray:
    """`size` bytes of whole elements in as equal parts as possible, the first ones larger."""
    return size // parts + (np.arange(parts) < size % parts)


@checked(n=RANKS, size=0, itemsize=1)
def ring_sum(
    n: int, size: int | np.ndarray, itemsize: int = 4, at: np.ndarray | None = None
) -> Iterator[Round]:
    """A ring all-reduce, or many at the same time: row i of `at` has the ranks of the i-th, n each."""
    yield from _half_ring(n, size, itemsize, at, 1)
    yield from _half_ring(n, size, itemsize, at, 0)


def _half_ring(n, size, itemsize, at, first) -> Iterator[Round]:
    """The reduce-scatter of a ring (first=1) or its all-gather (0). `size` may differ from ring to ring."""
    at = np.arange(n)[None] if at is None else at
    chunks = np.stack([equal_parts(s // itemsize, n) * itemsize for s in np.broadcast_to(size, len(at))])
    source, target, place = at.ravel(), np.roll(at, -1, axis=1).ravel(), np.arange(n)
    for step in range(n - 1):
        yield source, target, chunks[:, (place - first - step) % n].ravel()


@checked(n=RANKS, size=0, itemsize=1)
def tree_sum(n: int, size: int, itemsize: int = 4) -> Iterator[Round]:
    """A binomial tree to rank 0 and back."""
    rounds = []
    for k in range((n - 1).bit_length()):
        child = np.arange(1 << k, n, 2 << k)
        rounds.append((child, child - (1 << k), np.full(len(child), size)))
    yield from rounds
    yield from ((target, source, sizes) for source, target, sizes in reversed(rounds))


@checked(n=RANKS, size=0, itemsize=1, chunks=1)
def double_tree(n: int, size: int, itemsize: int = 4, chunks: int = 4) -> Iterator[Round]:
    """Two binary trees, half of the tensor in `chunks` through each: the chunks follow each other up, then down."""
    n = int(n)  # numpy takes no True
    both = map(np.array, trees(n))
    edges = []  # of both trees: child, parent, steps before the root, bytes of each chunk
    for parents, half in zip(both, equal_parts(size // itemsize, 2), strict=True):
        depth, above = np.zeros(n, int), parents.copy()
        while (above >= 0).any():
            depth += above >= 0
            above = np.where(above >= 0, parents[above], -1)
        child = np.flatnonzero(parents >= 0)
        edges.append((child, parents[child], depth[child], equal_parts(half, chunks) * itemsize))
    deepest = max((depth.max() for _, _, depth, _ in edges if len(depth)), default=0)
    for down in (False, True):
        for step in range(deepest + chunks - 1 if n > 1 else 0):
            parts = []
            for child, parent, depth, sizes in edges:
                chunk = step - (depth - 1 if down else deepest - depth)
                on = (chunk >= 0) & (chunk < chunks)
                ends = (parent, child) if down else (child, parent)
                parts.append((ends[0][on], ends[1][on], sizes[chunk[on]]))
            yield tuple(np.concatenate(column) for column in zip(*parts, strict=True))


@checked(n=RANKS, size=0, itemsize=1, machine=1)
def hierarchical(n: int, size: int, itemsize: int = 4, machine: int = 8) -> Iterator[Round]:
    """Reduce-scatter inside machines, ring all-reduce of each place's chunk along the rails, all-gather inside.

    Raises ValueError where the machines are not full.
    """
    n, machine = int(n), int(min(machine, n))
    if n % machine:
        raise ValueError(
            f"{n} ranks make no machines of {machine} ({n} % {machine} = {n % machine}). Use a multiple."
        )
    inside = np.arange(n).reshape(-1, machine)
    yield from _half_ring(machine, size, itemsize, inside, 1)
    own = equal_parts(size // itemsize, machine) * itemsize
    yield from ring_sum(n // machine, own, itemsize, inside.T)
    yield from _half_ring(machine, size, itemsize, inside, 0)


@checked(n=RANKS, size=0, itemsize=1)
def all_to_all(n: int, size: int, itemsize: int = 4) -> Iterator[Round]:
    """Every rank sends a part of its `size` bytes to every other: in step s to the rank s places on."""
    source, parts = np.arange(n), equal_parts(size // itemsize, n) * itemsize
    for step in range(1, n):
        target = (source + step) % n
        yield source, target, parts[target]


ALGORITHMS: dict[str, Callable[..., Iterator[Round]]] = {
    "ring": ring_sum,
    "tree": tree_sum,
    "double tree": double_tree,
    "hierarchical": hierarchical,
    "all to all": all_to_all,
}


@checked(ranks=(1, 2**20), size=0)
def collective(name: str, ranks: int, size: int, fabric: Fabric, **options) -> Counted:
    """A collective of ALGORITHMS over so many ranks, each with `size` bytes.

    Raises ValueError for a name that is not there, and for ranks that do not fill whole machines.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"No collective is called {name!r}. Use one of: {', '.join(ALGORITHMS)}.")
    if name == "hierarchical":
        options = {"machine": fabric.machine} | options
    count = 2 * (ranks - 1) if name == "ring" else None
    return run_rounds(ranks, ALGORITHMS[name](ranks, size, **options), fabric, count)


@checked(ranks=1, size=0)
def in_network(ranks: int, size: int, fabric: Fabric) -> tuple[float, float]:
    """(seconds, bytes a rank's network card sends) of an all-reduce whose sums are made by the switches.

    Inside a machine as in `hierarchical`; then each rank sends its chunk up once and receives the sum once, while a
    ring would send almost two chunks.
    """
    machine = min(fabric.machine, ranks)
    inside = all_reduce_time("ring", machine, size, fabric.inside)
    if ranks <= machine:
        return inside, 0.0
    latency, slowest = fabric.rail.latency, fabric.rail.bandwidth
    if ranks > fabric.pod:
        latency += fabric.spine.latency
        slowest = min(slowest, fabric.spine.bandwidth / fabric.taper)
    return inside + 2 * latency + size / machine / slowest, size / machine


@checked(n=(1, 10**15), mean=0, spread=MORE)
def slowest_of(n: int, mean: float, spread: float) -> float:
    """The expected time of the slowest of n ranks whose times are normal: what a step with a barrier takes.

    Blom 1958, at most 0.03 of the spread off: the quantile at (n - 3/8) / (n + 1/4).
    """
    from statistics import NormalDist

    return mean if n == 1 else NormalDist(mean, spread).inv_cdf((n - 0.375) / (n + 0.25))
