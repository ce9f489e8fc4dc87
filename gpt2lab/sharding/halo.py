"""Windows that slide over a cut dimension: each rank needs rows of its neighbours, its halo.

`unfold` reads `reach` rows of an image for each row of its result, so a rank wants `reach - 1` rows more than it makes.
Its backward adds up what all windows say about a row: there the same rows travel back, and are added.
"""

import math
from dataclasses import dataclass

from ..ranks.traffic import direct_cost
from .describe import Option
from .graph import Node
from .layout import Layout, Mesh, Place, local_shape, span

Span = tuple[int, int]  # first row and number of rows


@dataclass(frozen=True)
class Halo:
    """Rows of dimension `row` of an image, of this shape and layout, that go between the ranks of one axis.

    The windows are `reach` long; `back` is for the backward of unfold.
    """

    axis: str
    row: int
    shape: tuple[int, ...]
    layout: Layout
    reach: int
    back: bool
    element: int

    @classmethod
    def of(cls, axis: str, option: Option, node: Node, read: Node, needs: Layout, made: Layout) -> "Halo":
        """What an operator with windows needs that reads `read` in layout `needs`, and makes its result in `made`."""
        ((_, row),) = option.halos
        longer, shorter = read.shape[row], node.shape[option.output]
        if back := longer < shorter:
            longer, shorter, row = shorter, longer, option.output
        shape, layout = (node.shape, made) if back else (read.shape, needs)
        return cls(axis, row, shape, layout, longer - shorter + 1, back, node.element)

    def spans(self, mesh: Mesh) -> tuple[list[Span], list[Span]]:
        """The rows that each rank of the axis has, and those that it wants."""
        cut = lambda length: [
            span(length, (self.axis,), mesh, {self.axis: r}) for r in range(mesh[self.axis])
        ]
        own, longer = cut(self.shape[self.row]), self.reach - 1
        wide = [(first, rows + longer) for first, rows in cut(self.shape[self.row] - longer)]
        return (wide, own) if self.back else (own, wide)

    def cost(self, mesh: Mesh, place: Place) -> tuple[int, int]:
        """(bytes, messages) that the rank at `place` sends."""
        local, (have, want) = local_shape(self.shape, self.layout, mesh, place), self.spans(mesh)
        row, mine = self.element * math.prod(local) // local[self.row], have[place[self.axis]]
        return direct_cost([row * overlap(mine, one)[1] for one in want], place[self.axis])


def overlap(a: Span, b: Span) -> Span:
    """The rows that are in both."""
    first = max(a[0], b[0])
    return first, max(0, min(sum(a), sum(b)) - first)
