"""Matrix products C = A B on a mesh x, y, z: 1-D, SUMMA on x and y, and z layers of it, up to 3-D.

x cuts the rows of C, y its columns, and z the inner index: each layer makes a term of C. The mesh decides which
algorithm it is: one axis is 1-D; x and y are SUMMA (van de Geijn & Watts 1997), which sends panels of A along y and
of B along x; z adds layers, whose terms of C are summed: as many as x and y are long is 3-D (Agarwal et al. 1995),
fewer is 2.5-D (Solomonik & Demmel 2011). Each matrix lies cut over all ranks, once, as `LAYOUTS` says.

Forward: panels are broadcast, C is reduce-scattered over z. Backward: the gradient of C is gathered over z, those of
the panels are reduced to their owners; panels are kept, so the same bytes travel.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise

import torch

from ..machine.arguments import checked
from ..ranks import comm
from ..ranks.traffic import split_sizes
from .cost import path
from .layout import Layout, Mesh
from .reshard import Axes

LAYOUTS = {
    "A": Layout((("x",), ("z", "y"))),
    "B": Layout((("z", "x"), ("y",))),
    "C": Layout((("x", "z"), ("y",))),
}
USED = {
    "A": Layout((("x",), ("z",))),
    "B": Layout((("z",), ("y",))),
    "C": Layout((("x",), ("y",)), (("z", "sum"),)),
}
"""What a rank holds of each matrix while it multiplies."""
GRIDS = {
    4: {"1-D": (4, 1, 1), "SUMMA": (2, 2, 1), "1-D, two layers": (2, 1, 2)},
    8: {"1-D": (8, 1, 1), "SUMMA": (2, 4, 1), "3-D": (2, 2, 2)},
}
"""Sizes of x, y and z on 4 and 8 ranks."""


@checked(inner=1)
def multiply(a: torch.Tensor, b: torch.Tensor, inner: int, axes: Axes) -> torch.Tensor:
    """This rank's part of C from its parts of A and B, whose inner index is `inner` long; differentiable.

    Raises ValueError where the parts are not those of `LAYOUTS`.
    """
    share = split_sizes(inner, axes["z"].size)[axes["z"].rank]
    want = [split_sizes(share, axes[name].size)[axes[name].rank] for name in "yx"]
    if (a.size(1), b.size(0)) != tuple(want):
        raise ValueError(
            f"an inner index of {inner} gives this rank {want[0]} columns of A and {want[1]} rows of B, not "
            f"{a.size(1)} and {b.size(0)}. Cut both with products.LAYOUTS."
        )
    return _Multiply.apply(a, b, inner, [axes[name] for name in "xyz"])


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, inner, axes):
        x, y, z = ctx.axes = axes
        ctx.sizes, ctx.kept, c = (a.shape, b.shape), [], a.new_zeros(len(a), b.size(1))
        for (column, left), (row, right) in panels(split_sizes(inner, z.size)[z.rank], y.size, x.size):
            length = left.stop - left.start
            mine = a[:, left].contiguous() if y.rank == column else a.new_empty(len(a), length)
            other = b[right].contiguous() if x.rank == row else b.new_empty(length, b.size(1))
            panel = comm.broadcast(mine, y, column), comm.broadcast(other, x, row)
            ctx.kept.append((column, left, row, right, *panel))
            c = c + panel[0] @ panel[1]
        return comm.reduce_scatter(c, z, 0)

    @staticmethod
    def backward(ctx, grad):
        x, y, z = ctx.axes
        grad = comm.all_gather(grad.contiguous(), z, 0, split_sizes(ctx.sizes[0][0], z.size))
        of_a, of_b = map(grad.new_empty, ctx.sizes)
        for column, left, row, right, a, b in ctx.kept:
            mine, other = comm.reduce(grad @ b.T, y, column), comm.reduce(a.T @ grad, x, row)
            if y.rank == column:
                of_a[:, left] = mine
            if x.rank == row:
                of_b[right] = other
        return of_a, of_b, None, None


@checked(inner=(0, 10**6), columns=(1, 10**6), rows=(1, 10**6))
def panels(inner: int, columns: int, rows: int) -> Iterator[tuple[tuple[int, slice], tuple[int, slice]]]:
    """(owner, slice of its part) in A, of which `columns` ranks hold parts, and in B: panels of one owner in each."""
    ends = [[0, *accumulate(split_sizes(inner, n))] for n in (columns, rows)]
    for first, last in pairwise(sorted(set(ends[0]) | set(ends[1]))):
        owners = [max(i for i, end in enumerate(of[:-1]) if end <= first) for of in ends]
        yield tuple((i, slice(first - of[i], last - of[i])) for i, of in zip(owners, ends, strict=True))


@checked(sizes=0, mesh=1)
def elements(sizes: Mapping[str, tuple[int, int]], mesh: Mesh) -> int:
    """Elements that all ranks send for matrices of these sizes, {"A": (m, k), "B": (k, n), "C": (m, n)}; so does
    backward."""
    ways = [path(LAYOUTS[m], USED[m], sizes[m], mesh) for m in "AB"]
    return sum(w.total(mesh)[0] for w in (*ways, path(USED["C"], LAYOUTS["C"], sizes["C"], mesh)))


@checked(m=1, n=1, k=1, ranks=1)
def least(m: int, n: int, k: int, ranks: int) -> float:
    """Elements that some rank must receive, whatever its memory, if each matrix lies on the ranks once and evenly.

    Ballard et al. 2012, "Strong scaling of matrix multiplication algorithms and memory-independent communication lower
    bounds"; with these constants Al Daas, Ballard, Grigori, Kumar & Rouse 2022, theorem 3.
    """
    k, n, m = sorted((m, n, k))
    if ranks <= m / n:
        needed = (m * n + m * k) / ranks + n * k
    elif ranks <= m * n / k**2:
        needed = 2 * math.sqrt(m * n * k**2 / ranks) + m * n / ranks
    else:
        needed = 3 * (m * n * k / ranks) ** (2 / 3)
    return needed - (m * n + m * k + n * k) / ranks
