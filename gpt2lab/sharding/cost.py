"""What a change of layout costs: its steps, the bytes and messages of each rank, and the cheapest path.

A step is one collective over one mesh axis, or free: a slice, or zeros beside what a rank has. n ranks on the axis,
M bytes of the tensor held by the axis' ranks together (Zheng et al. 2022, "Alpa", table 2): all-gather
(n-1)/n M; all-to-all (n-1)/n^2 M; reduce-scatter (n-1)/n M; all-reduce 2 (n-1)/n M; slice, to-partial and pad nothing.
Here in exact integers for each rank, uneven parts included.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..machine.arguments import checked
from ..ranks import traffic
from ..ranks.traffic import split_sizes
from .layout import Layout, Mesh, Place, check, fits, local_shape, places, span

FREE = ("slice", "to-partial", "pad")
"""The steps that send nothing."""


@dataclass(frozen=True)
class Step:
    """One step over one axis: `kind` names the collective; `dim` is the dimension that it cuts or joins.

    An all-to-all joins `dim` and cuts `to`. A reduction has `op`, "sum" or "max". To become a term of a sum, a whole
    tensor stays on the axis' first rank only (to-partial), and a part gets zeros around it along `dim` (pad).
    """

    kind: str
    axis: str
    dim: int | None = None
    to: int | None = None
    op: str | None = None

    def __str__(self) -> str:
        where = "" if self.dim is None else f" {self.dim}" + ("" if self.to is None else f" to {self.to}")
        return f"{self.kind}{where} over {self.axis}"


def steps(layout: Layout, mesh: Mesh) -> Iterator[tuple[Step, Layout]]:
    """Every step that can be taken from a layout, and the layout after it."""
    for axis in mesh:
        state = layout.on(axis)
        if state is None:
            for dim, cut in enumerate(layout.cuts):
                yield Step("slice", axis, dim), layout.cut(dim, (*cut, axis))
            yield Step("to-partial", axis, op="sum"), layout.summed(axis, "sum")
        elif isinstance(state, str):
            done = layout.summed(axis)
            yield Step("all-reduce", axis, op=state), done
            for dim, cut in enumerate(layout.cuts if state == "sum" else ()):
                yield Step("reduce-scatter", axis, dim, op=state), done.cut(dim, (*cut, axis))
        elif layout.cuts[state][-1] == axis:
            joined = layout.cut(state, layout.cuts[state][:-1])
            yield Step("all-gather", axis, state), joined
            yield Step("pad", axis, state, op="sum"), joined.summed(axis, "sum")
            for dim, cut in enumerate(joined.cuts):
                if dim != state:
                    yield Step("all-to-all", axis, state, dim), joined.cut(dim, (*cut, axis))


def step_cost(step: Step, shape: Sequence[int], layout: Layout, mesh: Mesh, place: Place, element: int):
    """(bytes, messages) that the rank at `place` sends when the step is taken from `layout`."""
    n, rank, local = mesh[step.axis], place[step.axis], local_shape(shape, layout, mesh, place)
    if n == 1 or step.kind in FREE:
        return 0, 0
    size = element * math.prod(local)
    if step.kind == "all-reduce":
        return traffic.all_reduce_cost([element * c for c in split_sizes(math.prod(local), n)], rank)
    if step.kind == "all-gather":
        before = span(shape[step.dim], layout.cuts[step.dim][:-1], mesh, place)[1]
        row = size // local[step.dim] if local[step.dim] else 0
        return traffic.all_gather_cost([row * c for c in split_sizes(before, n)], rank)
    dim = step.dim if step.kind == "reduce-scatter" else step.to
    row = size // local[dim] if local[dim] else 0
    chunks = [row * c for c in split_sizes(local[dim], n)]
    count = traffic.reduce_scatter_cost if step.kind == "reduce-scatter" else traffic.direct_cost
    return count(chunks, rank)


def added(costs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """(bytes, messages) of several, together."""
    return tuple(map(sum, zip((0, 0), *costs, strict=True)))


@checked(mesh=1, place=0, element=1)
@dataclass(frozen=True)
class Path:
    """Steps from one layout to another; `layouts` are those before each step and the last one after it."""

    steps: tuple[Step, ...]
    layouts: tuple[Layout, ...]
    shape: tuple[int, ...]

    def cost(self, mesh: Mesh, place: Place, element: int = 1) -> tuple[int, int]:
        """(bytes, messages) that the rank at `place` sends."""
        steps = zip(self.steps, self.layouts, strict=False)
        return added(step_cost(step, self.shape, layout, mesh, place, element) for step, layout in steps)

    def total(self, mesh: Mesh, element: int = 1) -> tuple[int, int]:
        """(bytes, messages) that all ranks send together."""
        steps, axes = zip(self.steps, self.layouts, strict=False), tuple(mesh.items())
        size, messages = added(_total(step, tuple(self.shape), layout, axes) for step, layout in steps)
        return element * size, messages


@checked(mesh=1)
def path(src: Layout, dst: Layout, shape: Sequence[int], mesh: Mesh) -> Path:
    """The cheapest way from one layout to another: fewest bytes of all ranks, then messages, then steps.

    Raises ValueError where a layout does not fit the shape or the mesh, or where no way leads there: a maximum cannot
    be made partial again.
    """
    check(src, shape, mesh)
    check(dst, shape, mesh)
    ends = tuple(axis for axis in mesh if dst.on(axis) == "sum")  # partial only where it is so in the end
    found, queue = _search(src, ends, tuple(shape), tuple(mesh.items()))
    while dst not in found:
        if not queue:
            axes = tuple(mesh)
            raise ValueError(f"no steps lead from {src.text(axes)} to {dst.text(axes)}: a maximum is final.")
        _go_on(found, queue, ends, tuple(shape), tuple(mesh.items()))
    return found[dst]


@lru_cache(maxsize=100_000)
def _search(src, ends, shape, mesh_items) -> tuple[dict[Layout, Path], list]:
    """The paths that are known from a layout, and the queue of a search that goes on where it was."""
    return {}, [((0, 0, 0), "", src, (), (src,))]


def _go_on(found: dict[Layout, Path], queue: list, ends, shape, mesh_items) -> None:
    """One turn of Dijkstra's shortest paths over layouts; the text of the steps decides between equals.

    The layout in front stays there until all is done, so that an interrupt loses nothing.
    """
    mesh, (cost, text, at, taken, passed) = dict(mesh_items), queue[0]
    for step, after in steps(at, mesh) if at not in found else ():
        useful = step.kind != "to-partial" or step.axis in ends
        if useful and after not in found and fits(after, shape, mesh):
            size, messages = _total(step, shape, at, mesh_items)
            further = (cost[0] + size, cost[1] + messages, cost[2] + 1)
            entry = (further, f"{text} {step};", after, (*taken, step), (*passed, after))
            heapq.heappush(queue, entry)
    found.setdefault(at, Path(taken, passed, shape))
    heapq.heappop(queue)


@lru_cache(maxsize=100_000)
def _total(step, shape, layout, mesh_items) -> tuple[int, int]:
    mesh = dict(mesh_items)
    return added(step_cost(step, shape, layout, mesh, place, 1) for place in places(mesh))


@checked()
def adjoint(src: Layout, dst: Layout) -> tuple[Layout, Layout]:
    """From where to where the gradient goes when the tensor goes from `src` to `dst`.

    The gradient of a replicated tensor is replicated too, that of a partial sum is whole on each rank.

    Raises ValueError for a partial maximum: its gradient belongs to the rank that has it.
    """
    if "max" in dict(src.partial).values():
        raise ValueError("a change from a partial maximum has no gradient. Give it a tensor that needs none.")
    return dst.dual, src.dual


@checked(shape=0, mesh=1)
def cost_table(layouts: Sequence[Layout], shape: Sequence[int], mesh: Mesh) -> list[list]:
    """The cost matrix: the most bytes of float64 that a rank sends, from each layout (row) to each (column)."""
    return [
        [max(path(a, b, shape, mesh).cost(mesh, place, 8)[0] for place in places(mesh)) for b in layouts]
        for a in layouts
    ]
