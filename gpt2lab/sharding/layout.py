"""Layouts: which mesh axes cut which dimensions of a tensor, and over which axes it is still to be summed.

A mesh is a dict of axis sizes, `{"x": 2, "y": 3}`; ranks are numbered with the last axis innermost. Sizes of parts
follow `split_sizes`: they differ by at most one, the larger ones first. A dimension cut by two axes is first cut by
one, then each part by the other.

Text forms: `S0R` of Alpa (Zheng et al. 2022, section 4.1), where a digit is the place of the axis in the mesh; and
names, `batch:x, ff:y`, as in Mesh-TensorFlow (Shazeer et al. 2018).
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..machine.arguments import checked
from ..ranks.traffic import split_sizes

Mesh = Mapping[str, int]
Place = Mapping[str, int]
LETTERS = {"P": "sum", "M": "max"}


@dataclass(frozen=True)
class Layout:
    """`cuts[d]` are the axes that cut dimension d, the outermost first; `partial` are (axis, "sum" or "max").

    Over a partial axis each rank holds a term of the sum (or maximum), as large as the whole.
    Raises ValueError where an axis appears twice.
    """

    cuts: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "partial", tuple(sorted(self.partial)))
        axes = [*itertools.chain(*self.cuts), *(axis for axis, _ in self.partial)]
        for axis in axes:
            if axes.count(axis) > 1:
                raise ValueError(
                    f"mesh axis {axis!r} is used {axes.count(axis)} times in one layout. "
                    "Use each axis once: for one dimension, or for a partial sum."
                )

    @classmethod
    @checked(dims=(0, 16))
    def whole(cls, dims: int) -> "Layout":
        """The layout of a tensor that every rank holds whole."""
        return cls(((),) * dims)

    @classmethod
    @checked()
    def parse(cls, text: str, axes: str | Sequence[str]) -> "Layout":
        """`S0R`, `RS01`, `RRP0`: S and R for each dimension, then P (sum) or M (max); digits count `axes`."""
        if text != "-" and not re.fullmatch(r"(R|S\d+)*([PM]\d+)*", text):
            raise ValueError(
                f"layout {text!r} is not understood. Write R or S with digits for each dimension, "
                "then P or M with digits, as in S0R or RRP1."
            )
        tokens = re.findall(r"R|[SPM]\d+", text)
        high = max((int(d) for t in tokens for d in t[1:]), default=-1)
        if high >= len(axes):
            known = ", ".join(f"{i} is {axis!r}" for i, axis in enumerate(axes)) or "Use R alone"
            raise ValueError(f"layout {text!r} names axis {high}, but the mesh has {len(axes)}: {known}.")
        named = [(t[0], tuple(axes[int(d)] for d in t[1:])) for t in tokens]
        cuts = tuple(cut for letter, cut in named if letter in "RS")
        return cls(cuts, tuple((a, LETTERS[letter]) for letter, cut in named if letter in "PM" for a in cut))

    @classmethod
    @checked()
    def named(cls, text: str, dims: Sequence[str]) -> "Layout":
        """`batch:x, ff:y` of a tensor whose dimensions have these names; names that it lacks are refused."""
        cuts = dict.fromkeys(dims, ())
        for part in filter(None, re.split(r"[,\s]+", text)):
            name, _, axis = part.partition(":")
            if name not in cuts or not axis:
                raise ValueError(
                    f"mark {part!r} does not fit a tensor with dimensions {', '.join(dims)}. "
                    "Write dimension:axis, as in " + f"{dims[0] if dims else 'batch'}:x."
                )
            cuts[name] += (axis,)
        return cls(tuple(cuts[name] for name in dims))

    @checked()
    def text(self, axes: str | Sequence[str]) -> str:
        """The papers' form, which `parse` reads; `-` for a whole scalar."""
        digits = lambda cut: "".join(str(list(axes).index(a)) for a in cut)
        parts = ["S" + digits(cut) if cut else "R" for cut in self.cuts]
        for letter, op in LETTERS.items():
            if found := [a for a, kind in self.partial if kind == op]:
                parts.append(letter + digits(found))
        return "".join(parts) or "-"

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes over which the ranks hold different things."""
        return (*itertools.chain(*self.cuts), *(axis for axis, _ in self.partial))

    @property
    def dual(self) -> "Layout":
        """The layout of this tensor's gradient: cut alike, and whole where the tensor is partial."""
        return Layout(self.cuts)

    @checked(dim=0)
    def cut(self, dim: int, axes: str | Sequence[str]) -> "Layout":
        """The same, with `axes` cutting dimension `dim`."""
        cuts = list(self.cuts)
        cuts[dim] = tuple(axes)
        return replace(self, cuts=tuple(cuts))

    def summed(self, axis: str, op: str | None = None) -> "Layout":
        """The same, partial over `axis` by `op`, or no longer partial."""
        others = tuple(p for p in self.partial if p[0] != axis)
        return replace(self, partial=others + (((axis, op),) if op else ()))

    def on(self, axis: str) -> int | str | None:
        """What one axis does: the dimension that it cuts, "sum" or "max", or None."""
        for dim, cut in enumerate(self.cuts):
            if axis in cut:
                return dim
        return dict(self.partial).get(axis)


@checked(mesh=1)
def ranks(mesh: Mesh) -> int:
    """How many ranks the mesh has."""
    return math.prod(mesh.values())


@checked(mesh=1)
def places(mesh: Mesh) -> list[dict[str, int]]:
    """Where each rank stands: its coordinate on every axis."""
    return [dict(zip(mesh, at, strict=True)) for at in itertools.product(*map(range, mesh.values()))]


@checked(mesh=1, numbers=0)
def lines_along(mesh: Mesh, axis: str, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """The ranks along one axis, line by line; `numbers` are those of the ranks at `places(mesh)`."""
    found: dict[tuple, list[int]] = {}
    for number, place in zip(numbers, places(mesh), strict=True):
        found.setdefault(tuple(at for name, at in place.items() if name != axis), []).append(number)
    return list(map(tuple, found.values()))


@checked()
def check_dims(layout: Layout, shape: Sequence[int]) -> None:
    """Raise ValueError where the layout has another number of dimensions than the tensor."""
    if len(layout.cuts) != len(shape):
        raise ValueError(
            f"a layout of {len(layout.cuts)} dimensions does not fit a tensor of {len(shape)}. Use as many."
        )


@checked()
def check(layout: Layout, shape: Sequence[int], mesh: Mesh) -> None:
    """Raise ValueError where the layout does not fit the tensor or the mesh: wrong number of dimensions, unknown
    axis, or a dimension shorter than the ranks that cut it."""
    check_dims(layout, shape)
    for axis in layout.axes:
        if axis not in mesh:
            raise ValueError(f"the mesh has no axis {axis!r}. Its axes are {', '.join(mesh)}.")
    for length, cut in zip(shape, layout.cuts, strict=True):
        parts = math.prod(mesh[a] for a in cut)
        if cut and length < parts:
            raise ValueError(
                f"a dimension of {length} cannot be cut into {parts} parts over {' x '.join(cut)}. "
                f"Use at most {length} ranks for it, or leave it whole."
            )


@checked(length=0)
def span(length: int, cut: Sequence[str], mesh: Mesh, place: Place) -> tuple[int, int]:
    """First index and length of what the rank at `place` holds of a dimension of `length`."""
    first = 0
    for axis in cut:
        sizes = split_sizes(length, mesh[axis])
        first, length = first + sum(sizes[: place[axis]]), sizes[place[axis]]
    return first, length


@checked(mesh=1, place=0)
def local_shape(shape: Sequence[int], layout: Layout, mesh: Mesh, place: Place) -> tuple[int, ...]:
    """The shape of what the rank at `place` holds."""
    return tuple(span(n, cut, mesh, place)[1] for n, cut in zip(shape, layout.cuts, strict=True))


@checked(mesh=1, place=0)
def box(shape: Sequence[int], layout: Layout, mesh: Mesh, place: Place) -> tuple[slice, ...]:
    """The slices of the whole tensor that the rank at `place` holds."""
    check_dims(layout, shape)
    spans = [span(n, cut, mesh, place) for n, cut in zip(shape, layout.cuts, strict=True)]
    return tuple(slice(first, first + size) for first, size in spans)


@checked()
def fits(layout: Layout, shape: Sequence[int], mesh: Mesh) -> bool:
    """Whether every rank gets a part that is not empty."""
    return all(n >= math.prod(mesh[a] for a in cut) for n, cut in zip(shape, layout.cuts, strict=True) if cut)
