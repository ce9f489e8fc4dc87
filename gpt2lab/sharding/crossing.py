"""From the layout of one group of ranks to that of another group: only boxes that overlap are sent.

A rank of the target asks, for each box of the source, one of the ranks that hold it. Where the target holds several
copies, each of its ranks first receives only a part, and the copies are then gathered among its own ranks: the
scatter/all-gather of Narayanan et al. 2021, section 4.1, and of Zhuang et al. 2022, "On Optimizing the Communication
of Model Parallelism".
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .cost import Path, added, path
from .layout import Layout, Mesh, box, fits, places

Box = tuple[tuple[int, int], ...]
"""Of each dimension the first index, and the one after the last."""


@dataclass(frozen=True)
class Side:
    """The ranks of a mesh, in its order, and how the tensor lies there. Sums are complete."""

    ranks: tuple[int, ...]
    mesh: Mesh
    layout: Layout

    def boxes(self, shape) -> dict[int, Box]:
        """What each rank holds of the whole tensor."""
        found = (box(shape, self.layout, self.mesh, place) for place in places(self.mesh))
        return {r: tuple((s.start, s.stop) for s in b) for r, b in zip(self.ranks, found, strict=True)}


@dataclass(frozen=True)
class Crossing:
    """A tensor of `shape` with `element` bytes an element goes from one side to the other."""

    shape: tuple[int, ...]
    element: int
    source: Side
    target: Side

    @cached_property
    def arrival(self) -> Side:
        """The target's side as it is when the messages have arrived: cut over axes that will hold copies."""
        mesh, lies = self.target.mesh, self.target.layout
        for axis in [a for a in mesh if lies.on(a) is None]:
            ways = [lies.cut(d, (*cut, axis)) for d, cut in enumerate(lies.cuts)]
            lies = next((way for way in ways if fits(way, self.shape, mesh)), lies)
        return Side(self.target.ranks, mesh, lies)

    @cached_property
    def way(self) -> Path:
        """The gathers on the target's ranks."""
        return path(self.arrival.layout, self.target.layout, self.shape, self.target.mesh)

    def pieces(self) -> Iterator[tuple[int, int, Box]]:
        """(from rank, to rank, box) of all that is sent, or kept where both are the same."""
        holders: dict[Box, list[int]] = {}
        for rank, has in self.source.boxes(self.shape).items():
            holders.setdefault(has, []).append(rank)
        for number, (to, wants) in enumerate(self.arrival.boxes(self.shape).items()):
            for has, ranks in holders.items():
                both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(has, wants, strict=True))
                if all(start < end for start, end in both):
                    yield (to if to in ranks else ranks[number % len(ranks)]), to, both

    def cost(self, rank: int) -> tuple[int, int]:
        """(bytes, messages) that a rank sends, gathers included."""
        leaving = (box for source, to, box in self.pieces() if source == rank != to)
        sent = [(math.prod(end - start for start, end in box) * self.element, 1) for box in leaving]
        if rank in self.target.ranks:
            place = places(self.target.mesh)[self.target.ranks.index(rank)]
            sent.append(self.way.cost(self.target.mesh, place, self.element))
        return added(sent)
