"""The mesh: who shares what, on live ranks."""

from contextlib import suppress
from itertools import permutations

import numpy as np
import pytest
import torch

from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh


@pytest.fixture(scope="module")
def ranks(pools):
    return pools[8]


def look(rank, world_size, sizes):
    mesh = Mesh(**sizes)
    sums = {n: comm.all_reduce(torch.tensor([10.0**rank]), mesh[n]).item() for n in sizes}
    both = comm.all_reduce(torch.tensor([10.0**rank]), mesh["dp", "cp"]).item()
    return mesh.coordinates(), {n: mesh[n].ranks for n in sizes}, sums, both


def test_eight_ranks_as_a_cube_find_their_neighbours(ranks):
    found = ranks.run(look, {"pp": 2, "dp": 2, "tp": 2})
    grid = np.arange(8).reshape(2, 2, 2)
    for rank, (place, lines, sums, both) in enumerate(found):
        p, d, t = np.argwhere(grid == rank)[0]
        assert place == {"pp": p, "dp": d, "cp": 0, "tp": t}
        expected = {"pp": grid[:, d, t], "dp": grid[p, :, t], "tp": grid[p, d, :]}
        for name, line in expected.items():
            assert lines[name] == tuple(line)
            assert sums[name] == sum(10.0**r for r in line)  # the group really joins these ranks, not others
        assert both == sums["dp"]


def test_tensor_parallel_ranks_are_neighbours(ranks):
    _, lines, _, _ = ranks.run(look, {"dp": 4, "tp": 2})[5]
    assert lines == {"dp": (1, 3, 5, 7), "tp": (4, 5)}


def test_a_group_inherits_the_timeout_of_its_world(ranks):
    def timeouts(rank, world_size):
        from gpt2lab.ranks.mesh import _timeout

        axis = Mesh(dp=4, tp=2)["dp"]
        return _timeout(axis.group), _timeout(), _timeout(Mesh(dp=8).side_group())

    for line, world, side in ranks.run(timeouts):
        assert line == world == side and world.total_seconds() > 60


def test_a_mesh_of_the_wrong_size_says_both_numbers():
    with pytest.raises(ValueError, match="is a mesh of 6 ranks, but the world has 1"):
        Mesh(dp=3, tp=2)


def test_an_unknown_axis_is_named():
    with pytest.raises(ValueError, match="No axis is called xp. The axes are pp, dp, cp, tp."):
        Mesh(xp=2)


def test_the_serial_mesh_needs_no_process_group():
    mesh = Mesh()
    assert mesh["tp"].size == 1 and mesh.world.ranks == (0,) and mesh["dp"].peers == ()


def in_every_order(rank, world_size):
    """The lines that a mesh takes."""
    mesh, taken = Mesh(dp=world_size), []
    for line in permutations(range(world_size)):
        with suppress(ValueError):
            axis = mesh.axis("line", [line], own=True)
            part = comm.all_gather(torch.tensor([axis.rank]), axis, 0, [1] * axis.size)
            taken.append((line, part.tolist()))
    return taken


@pytest.mark.parametrize("size", [2, 3])
def test_a_line_in_another_order_than_its_group_s_is_refused(size, pools):
    assert pools[size].run(in_every_order)[0] == [(tuple(range(size)), list(range(size)))]
