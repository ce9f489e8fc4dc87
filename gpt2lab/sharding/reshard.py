"""A change of layout on live ranks: each step of the cheapest path is one call of ranks/comm.

Forward: the steps of `cost.path`. Backward: the path between the gradients' layouts, the other way round.
Bytes per rank: exactly `Path.cost`.
"""

from collections.abc import Mapping, Sequence

import torch

from ..machine.arguments import checked
from ..ranks import comm
from ..ranks.mesh import Axis
from ..ranks.mesh import Mesh as World
from .cost import Path, Step, adjoint, path
from .halo import Span, overlap
from .layout import Layout, box, check_dims, lines_along, local_shape, ranks, span

Axes = Mapping[str, Axis]


@checked(mesh=1)
def live_axes(mesh: Mapping[str, int]) -> dict[str, Axis]:
    """The axes of a mesh on live ranks; all ranks call this together.

    Raises ValueError when the sizes do not multiply to the number of ranks.
    """
    world = World(dp=ranks(mesh))
    return {name: world.axis(name, lines_along(mesh, name, range(ranks(mesh)))) for name in mesh}


def sizes(axes: Axes) -> dict[str, int]:
    """The mesh that live axes form: their sizes by name."""
    return {name: axis.size for name, axis in axes.items()}


def place(axes: Axes) -> dict[str, int]:
    """This rank's coordinate on every axis."""
    return {name: axis.rank for name, axis in axes.items()}


@checked()
def shard(whole: torch.Tensor, layout: Layout, axes: Axes) -> torch.Tensor:
    """This rank's part of a whole tensor: its slices; zeros on all but the first rank of an axis that sums."""
    part = whole[box(whole.shape, layout, sizes(axes), place(axes))]
    for axis, op in layout.partial:
        if op == "sum" and axes[axis].rank:
            part = torch.zeros_like(part)
    return part.contiguous()


@checked()
def reshard(x: torch.Tensor, src: Layout, dst: Layout, shape: Sequence[int], axes: Axes) -> torch.Tensor:
    """This rank's part in `dst` of a tensor of `shape` of which it holds its part in `src`; differentiable.

    Raises ValueError when x is not the part that `src` says.
    """
    check_dims(src, shape)
    want = local_shape(shape, src, sizes(axes), place(axes))
    if tuple(x.shape) != want:
        raise ValueError(
            f"rank at {place(axes)} holds {tuple(x.shape)}, but {src.text(list(axes))} of "
            f"{tuple(shape)} is {want} there."
        )
    return _Reshard.apply(x, src, dst, tuple(shape), axes)


class _Reshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, src, dst, shape, axes):
        ctx.change, ctx.shape, ctx.axes = (src, dst), shape, axes
        moved = follow(x.detach(), path(src, dst, shape, sizes(axes)), axes)
        return moved.view_as(moved)

    @staticmethod
    def backward(ctx, grad):
        src, dst = adjoint(*ctx.change)
        way = path(src, dst, ctx.shape, sizes(ctx.axes))
        return follow(grad, way, ctx.axes), None, None, None, None


def follow(x: torch.Tensor, way: Path, axes: Axes) -> torch.Tensor:
    """Take the steps of a path, one after the other."""
    for step, layout in zip(way.steps, way.layouts, strict=False):
        x = take_step(x, step, layout, way.shape, axes)
    return x


def take_step(x: torch.Tensor, step: Step, layout: Layout, shape, axes: Axes) -> torch.Tensor:
    """One step from `layout`, on this rank's part x of a tensor of `shape`."""
    axis, dim = axes[step.axis], step.dim
    if step.kind == "all-reduce":
        return comm.all_reduce(x, axis, step.op)
    if step.kind == "reduce-scatter":
        return comm.reduce_scatter(x, axis, dim)
    if step.kind == "slice":
        return x.split(comm.split_sizes(x.size(dim), axis.size), dim)[axis.rank]
    if step.kind == "to-partial":
        return x if axis.rank == 0 else torch.zeros_like(x)
    before = span(shape[dim], layout.cuts[dim][:-1], sizes(axes), place(axes))[1]
    lengths = comm.split_sizes(before, axis.size)
    if step.kind == "pad":
        pieces = [x if r == axis.rank else _zeros(x, dim, length) for r, length in enumerate(lengths)]
        return torch.cat(pieces, dim)
    if step.kind == "all-gather":
        return comm.all_gather(x, axis, dim, lengths)
    parts = x.split(comm.split_sizes(x.size(step.to), axis.size), step.to)
    mine = list(parts[axis.rank].shape)
    shapes = [(*mine[:dim], length, *mine[dim + 1 :]) for length in lengths]
    return torch.cat(comm.all_to_all([p.contiguous() for p in parts], axis, shapes), dim)


def _zeros(like: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Zeros of the shape of a tensor, but so long along `dim`."""
    return like.new_zeros((*like.shape[:dim], length, *like.shape[dim + 1 :]))


def exchange_rows(
    x: torch.Tensor, dim: int, spans: tuple[list[Span], list[Span]], axis: Axis
) -> torch.Tensor:
    """From the rows of `dim` that each rank has to those that it wants; what arrives for the same row is added."""
    have, want = spans
    mine, wanted = have[axis.rank], want[axis.rank]
    leaving = [overlap(mine, one) for one in want]
    parts = [x.narrow(dim, first - mine[0] if rows else 0, rows).contiguous() for first, rows in leaving]
    arriving = [overlap(one, wanted) for one in have]
    rest = lambda rows: (*x.shape[:dim], rows, *x.shape[dim + 1 :])
    made = _zeros(x, dim, wanted[1])
    found = comm.all_to_all(parts, axis, [rest(rows) for _, rows in arriving])
    for (first, rows), part in zip(arriving, found, strict=True):
        made.narrow(dim, first - wanted[0] if rows else 0, rows).add_(part)
    return made
