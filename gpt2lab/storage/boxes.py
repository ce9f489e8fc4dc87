"""Where a rank's part of a parameter is in the whole tensor: as boxes, which any other layout can read.

A tensor-parallel slice of the fused q, k, v is three boxes; a parameter's part of a flat ZeRO shard is a partial row,
whole rows, and a partial row. Boxes say nothing about ranks, so any plan can read what another plan has written.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..parallel.spec import Cut, Spec
from ..ranks.mesh import Axis, Mesh


@dataclass(frozen=True)
class Box:
    """A view of this rank's memory and the position of its first element in the whole tensor."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[tuple[tuple, tuple]]:
    """(offsets, sizes) of the boxes that elements `start` to `stop` of a row-major tensor fill, in order."""
    if len(shape) == 1:
        return [((start,), (stop - start,))] if start < stop else []
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


def boxes(tensor: torch.Tensor, shape: Sequence[int], start: int, spec: Spec, mesh: Mesh) -> list[Box]:
    """The boxes of `tensor`: the elements from `start` on of this rank's slice, of `shape`, of a parameter."""
    found, flat, done = [], tensor.detach().view(-1), 0
    for offsets, sizes in rectangles(shape, start, start + tensor.numel()):
        count = math.prod(sizes)
        found.append(Box(offsets, flat[done : done + count].view(sizes)))
        done += count
    for cut in reversed(spec.cuts):
        found = [whole for box in found for whole in _uncut(box, cut, mesh[cut.axis])]
    return found


def _uncut(box: Box, cut: Cut, axis: Axis) -> list[Box]:
    """A box of a slice as boxes of the tensor before the cut, one for each of the cut's groups that it touches."""
    found, sizes = [], [s // cut.groups for s in cut.sizes(axis.size)]
    mine, before = sizes[axis.rank], sum(sizes[: axis.rank])
    begin, length = box.offsets[cut.dim], box.tensor.size(cut.dim)
    for group in range(cut.groups):
        first, last = max(begin, group * mine), min(begin + length, (group + 1) * mine)
        if first < last:
            offsets = list(box.offsets)
            offsets[cut.dim] = group * (cut.length // cut.groups) + before + first - group * mine
            found.append(Box(tuple(offsets), box.tensor.narrow(cut.dim, first - begin, last - first)))
    return found


def whole_shape(shape: Sequence[int], spec: Spec) -> tuple[int, ...]:
    """The shape of the whole parameter, given that of a slice."""
    whole = list(shape)
    for cut in spec.cuts:
        whole[cut.dim] = cut.length
    return tuple(whole)
