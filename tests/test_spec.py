"""Cutting a parameter and making it whole again."""

import pytest
import torch
from torch import nn

from gpt2lab.parallel import boxes, spec
from gpt2lab.ranks.mesh import Axis, Mesh


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("dim, groups", [(0, 1), (1, 1), (0, 3)])
def test_slices_are_tensor_splits_of_each_group(parts, dim, groups):
    whole = torch.arange(15 * 7).view(15, 7)
    for place in range(parts):
        got = spec.slice_of(whole, place, parts, dim, groups)
        want = torch.cat([third.tensor_split(parts, dim)[place] for third in whole.chunk(groups, dim)], dim)
        assert torch.equal(got, want)


def test_a_cut_remembers_itself_and_what_was_marked_before():
    p = nn.Parameter(torch.zeros(12, 5))
    spec.mark(p, partial=("tp",))
    half = spec.cut(p, Axis("tp", (0, 1), 1), 0, 3)
    assert half.shape == (6, 5)
    assert half.spec == spec.Spec((spec.Cut("tp", 0, 12, 3),), partial=("tp",))
    assert spec.of(nn.Parameter(torch.zeros(1))) == spec.Spec()


def cut_twice_and_join(rank, world_size):
    mesh, whole = Mesh(dp=2, tp=3), torch.randn(37, 21, generator=torch.Generator().manual_seed(0))
    p = nn.Parameter(whole.clone())
    p = spec.cut(spec.cut(p, mesh["tp"], 1, 3), mesh["dp"], 0)
    mine = boxes.entry_of(torch.zeros_like(p), p.shape, 0, p.spec, mesh)
    for box in mine.boxes:
        boxes.fill(box, *boxes.whole(whole).boxes)
        at = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        assert torch.equal(box.tensor, whole[at]) and mine.shape == whole.shape
    assert sum(box.tensor.numel() for box in mine.boxes) == p.numel()
    return torch.equal(spec.full(p, p.spec, mesh), whole)


def test_full_undoes_any_cuts_also_uneven_ones_in_groups(pools):
    assert all(pools[6].run(cut_twice_and_join))
