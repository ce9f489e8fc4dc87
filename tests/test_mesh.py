"""The mesh: who shares what, on live ranks."""

from collections import Counter
from contextlib import suppress
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plan_cases import pretended
from planting import planted

from gpt2lab.plan import Plan
from gpt2lab.ranks import comm
from gpt2lab.ranks import mesh as mesh_file
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


def test_a_group_inherits_the_timeout_of_its_world(ranks):
    def timeouts(rank, world_size):
        axis, timeout = Mesh(dp=4, tp=2)["dp"], mesh_file._timeout
        return timeout(axis.group), timeout(), timeout(Mesh(dp=8).side_group())

    for line, world, side in ranks.run(timeouts):
        assert line == world == side and world.total_seconds() > 60


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


def opened(rank: int, world_size: int, sizes: dict):
    """(axis, ranks) of the groups that a mesh makes over NCCL, and the pairs that it opens as (axis, way, place)."""
    groups, pairs = [], set()

    def group(right):
        return lambda self, name, line: groups.append((name, line)) or "group"

    def message(op):
        return lambda right: (
            lambda x, axis, other: pairs.add((axis.name, op, other)) or SimpleNamespace(wait=lambda: None)
        )

    with (
        pretended(rank, world_size),
        planted(mesh_file, "one_queue_a_pair", lambda _: lambda: True),
        planted(Mesh, "_group", group),
        planted(comm, "isend", message("to")),
        planted(comm, "irecv", message("from")),
    ):
        Mesh(**sizes)
    return groups, pairs


@pytest.mark.parametrize("plan", ["dp=64", "dp=64,zero=3", "dp=16,tp=4"])
def test_where_no_message_travels_no_pair_is_opened(plan):
    plan = Plan.parse(plan)
    groups, pairs = opened(5, plan.world, plan.axes)
    assert pairs == set()
    lines = [line for _, line in groups]
    assert max(map(lines.count, lines), default=1) <= 2, "one group for an axis, not three"
    assert plan.tp > 1 or not groups, "an axis of all ranks shares the world's group"


def test_pairs_are_opened_along_the_axes_of_messages_alone():
    plan = Plan.parse("pp=4,dp=2,tp=2,micro=4")
    groups, pairs = opened(4, plan.world, plan.axes)
    assert {axis for axis, _, _ in pairs} == {"pp"} and len(pairs) == 2 * 3
    count = Counter(name for name, _ in groups)
    assert count["pp"] == 3 * 4 and count["tp"] == 8 and count["dp"] == 8


def test_pairs_of_servers_are_opened_and_by_hand_those_of_every_axis():
    plan = Plan.parse("dp=4,data=servers")
    assert {axis for axis, _, _ in opened(1, 4, plan.axes)[1]} == {"dp+cp"}
    assert {axis for axis, _, _ in opened(1, 4, {"dp": 2, "tp": 2})[1]} == {"dp", "tp", "dp+cp"}


def test_a_message_along_an_axis_that_carries_none_is_refused_with_the_way_out():
    with pretended(0, 4), planted(mesh_file, "one_queue_a_pair", lambda _: lambda: True):
        axis = Mesh(tp=4, messages=())["tp"]
        for message in (comm.isend, comm.irecv, comm.send, comm.ring_shift):
            with pytest.raises(ValueError, match=r"Axis 'tp' was made for calls .* messages=\['tp'\]"):
                message(torch.ones(3), axis, 1)
