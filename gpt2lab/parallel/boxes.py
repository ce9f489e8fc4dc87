"""Where a rank's part of a parameter is in the whole tensor: as boxes, which any other layout can read.

A tensor-parallel slice of the fused q, k, v is three boxes; a parameter's part of a flat ZeRO shard is a partial row,
whole rows, and a partial row. Boxes say nothing about ranks, so any plan can read what another plan has written.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..ranks.mesh import Axis, Mesh
from .spec import Cut, Spec


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where in it the first element is, its shape, and its elements, in memory or in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    # a view of this rank's memory, or what reads from a file when it is indexed by slices
    tensor: torch.Tensor


@dataclass(frozen=True)
class Entry:
    """What this rank holds of one tensor: the whole shape and its boxes."""

    shape: tuple[int, ...]
    boxes: list[Box]

    def copy(self) -> "Entry":
        """A copy with its own memory, which training does not change."""
        return Entry(self.shape, [replace(b, tensor=b.tensor.to("cpu", copy=True)) for b in self.boxes])


def whole(tensor: torch.Tensor) -> Entry:
    """A tensor of which this process holds everything."""
    return Entry(tuple(tensor.shape), [Box((0,) * tensor.dim(), tuple(tensor.shape), tensor)])


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple, tuple]]:
    """(offsets, sizes) of the boxes that elements `start` to `stop` of a row-major tensor fill, in order."""
    if len(shape) <= 1:
        one = [((start,), (stop - start,))] if shape else [((), ())]
        return one if start < stop else []
    found, width = [], math.prod(shape[1:])
    while start < stop:
        row, inside = divmod(start, width)
        if inside == 0 and stop - start >= width:
            rows = (stop - start) // width
            found.append(((row, *(0 for _ in shape[1:])), (rows, *shape[1:])))
            start += rows * width
        else:
            end = min(stop - start + inside, width)
            found += [((row, *o), (1, *s)) for o, s in rectangles(shape[1:], inside, end)]
            start += end - inside
    return found


def entry_of(tensor: torch.Tensor, shape: Sequence[int], start: int, spec: Spec, mesh: Mesh) -> Entry:
    """What `tensor` is of a parameter: the elements from `start` on of this rank's slice, which has `shape`."""
    filled = rectangles(shape, start, start + tensor.numel())
    parts = tensor.detach().view(-1).split([math.prod(sizes) for _, sizes in filled])
    found = [Box(*where, part.view(where[1])) for where, part in zip(filled, parts, strict=True)]
    complete = list(shape)
    for cut in reversed(spec.cuts):
        found = [uncut for box in found for uncut in _uncut(box, cut, mesh[cut.axis])]
    for cut in spec.cuts:
        complete[cut.dim] = cut.length
    return Entry(tuple(complete), found)


def _uncut(box: Box, cut: Cut, axis: Axis) -> list[Box]:
    """A box of a slice as boxes of the tensor before the cut, one for each of the cut's groups that it touches."""
    found, sizes = [], [s // cut.groups for s in cut.sizes(axis.size)]
    mine, before = sizes[axis.rank], sum(sizes[: axis.rank])
    begin, length = box.offsets[cut.dim], box.sizes[cut.dim]
    for group in range(cut.groups):
        first, last = max(begin, group * mine), min(begin + length, (group + 1) * mine)
        if first < last:
            offsets, part = list(box.offsets), box.tensor.narrow(cut.dim, first - begin, last - first)
            offsets[cut.dim] = group * (cut.length // cut.groups) + before + first - group * mine
            found.append(Box(tuple(offsets), tuple(part.shape), part))
    return found


def check_complete(name: str, shape: Sequence[int], found: Iterable[tuple[tuple, tuple]]) -> None:
    """Raise ValueError unless boxes, as (offsets, sizes), fill a tensor of `shape`, every element once."""
    found, shape = sorted(found), tuple(shape)
    for i, (begin, sizes) in enumerate(found):
        end = _ends(begin, sizes)
        inside = (
            len(end) == len(shape) and min(begin, default=0) >= 0 and tuple(map(max, end, shape)) == shape
        )
        if not inside:
            raise ValueError(f"a box of {name}, {begin} to {end}, is not inside its shape {shape}")
        for other in found[i + 1 :]:
            if other[0][:1] >= end[:1]:
                break  # in this order, all that follow begin below as well
            if _common((begin, sizes), other):
                raise ValueError(f"two boxes of {name} have the element {other[0]} in common")
    held, wanted = sum(math.prod(sizes) for _, sizes in found), math.prod(shape)
    if held != wanted:
        raise ValueError(f"{name} has {wanted} elements, of which {held} are there")


def fill(box: Box, source: Box) -> None:
    """Copy into a box the elements of the tensor that another one has too."""
    common = _common((box.offsets, box.sizes), (source.offsets, source.sizes))
    if common is not None:
        inside = lambda b: tuple(
            slice(low - o, high - o) for low, high, o in zip(*common, b.offsets, strict=True)
        )
        box.tensor[inside(box)] = source.tensor[inside(source)]


def _ends(begin: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(b + s for b, s in zip(begin, sizes, strict=True))


def _common(one: tuple[tuple, tuple], other: tuple[tuple, tuple]) -> tuple[tuple, tuple] | None:
    """Where what two boxes, as (offsets, sizes), have in common begins and ends; None where that is nothing."""
    low, high = tuple(map(max, one[0], other[0])), tuple(map(min, _ends(*one), _ends(*other)))
    return (low, high) if all(a < b for a, b in zip(low, high, strict=True)) else None
