"""Lesson 18: a rank dies, its neighbour holds its shard and training goes on; or the others go on without it."""

import os
import signal

import pytest
import torch
from lesson_cells import definitions

from gpt2lab.lessons.labs import survivors
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG

pytestmark = pytest.mark.live  # ranks of their own, which outlive each other
PLAN = "dp=3,zero=2"
COPYING = (  # rank 1 dies when it has its copy and rank 2 has none, so that rank 0 alone has the newest step
    "lengths = comm.gather_objects(len(own), axis)\n",
    "lengths = comm.gather_objects(len(own), axis)\n"
    "    if axis.rank == 1 and one.steps == 3 and copies:\n"
    "        comm.irecv(own.new_empty(lengths[0]), axis, 0).wait()\n"
    "        os.kill(os.getpid(), signal.SIGKILL)\n",
)
BUGS = {  # of the neighbour's memory, and where rank 1 dies: before this step
    "moments are forgotten": (
        2,
        ("survivors.take_back(one, copies)", "survivors.take_back(one, copies); one.optimizer.state.clear()"),
    ),
    "copies of the wrong neighbour": (
        2,
        ("axis, shape=(lengths[axis.rank - 1],)", "axis, by=-1, shape=(lengths[(axis.rank + 1) % 3],)"),
    ),
    "one copy is kept": (None, COPYING, ("sorted(copies)[:-2]", "sorted(copies)[:-1]")),
}
DIVISORS = "targets left", "all targets", "own targets, then replicas"


@pytest.fixture(scope="module")
def apart():
    pools = survivors.apart(3)
    yield pools
    for one in pools:
        one.close()


@pytest.fixture(scope="module")
def calm(apart):
    """Of the undisturbed run of four steps, on each rank: weights, and the bytes of its last copy."""
    return survivors.together(apart, defined("go_on"), PLAN, "calm", 4)


def defined(name, *bugs):
    cells = ["def steps(", "def go_on("] + ["def those_left("] * (name == "those_left")
    return definitions("18", *cells, bugs=bugs)[name]


def after_a_death(apart, run, dies, *bugs):
    """What the two survivors said, and what rank 0 has when all three have gone on."""
    go_on = defined("go_on", *bugs)
    first = survivors.together(apart, go_on, PLAN, run, 4, dies)
    assert first[1] == "was killed by SIGKILL", first
    return [first[0], first[2]], survivors.together(apart, go_on, PLAN, run, 4)[0]


def same_bits(found, calm):
    return not isinstance(found, str) and all(torch.equal(found[0][n], x) for n, x in calm[0][0].items())


def test_training_goes_on_from_the_neighbours_memory_with_the_same_bits(apart, calm):
    said, found = after_a_death(apart, "in a step", 2)
    assert said == ["lives, 2 steps done"] * 2 and same_bits(found, calm)


def test_after_a_death_in_the_middle_of_copying_all_go_back_to_the_same_step(apart, calm):
    said, found = after_a_death(apart, "in copying", None, COPYING)
    assert said == ["lives, 3 steps done"] * 2 and same_bits(found, calm)


def test_what_nobody_has_any_more_is_told_to_all(apart):
    """Rank 1, which kept the copy of rank 0's shard, and rank 0 both die."""
    go_on, run = defined("go_on"), "both"
    assert survivors.together(apart, go_on, PLAN, run, 2)[0][1] > 0
    for one in apart[:2]:
        one.close()
    said = survivors.together(apart, go_on, PLAN, run, 4)
    assert all("The shard of rank 0 is lost" in word and "from the disk" in word for word in said)


def test_a_copy_is_a_weight_and_two_moments_for_each_parameter(calm):
    assert sum(size for _, size in calm) == 3 * 8 * CONFIG.parameters


@pytest.mark.parametrize("name", BUGS)
def test_mutant_of_the_neighbours_memory_has_other_bits(apart, calm, name):
    dies, *bugs = BUGS[name]
    assert not same_bits(after_a_death(apart, name, dies, *bugs)[1], calm)


def test_a_step_without_the_dead_is_the_serial_step_on_the_rows_that_are_left(apart):
    survivors.together(apart, defined("go_on"), "dp=3", "replicas", 4, 2)
    run = defined("those_left")
    (serial,) = survivors.together(apart[:1], run, "targets left")
    right, *wrong = (survivors.together([apart[0], apart[2]], run, by)[0] for by in DIVISORS)
    error = lambda found: max((found[n] - x).abs().max().item() for n, x in serial.items())
    assert error(right) < 1e-10 and min(map(error, wrong)) > 1e-3
    (all_rows,) = survivors.together(
        apart[:1], defined("those_left", ("in (0, 2)]", "in (0, 1, 2)]")), DIVISORS[0]
    )
    assert error(all_rows) > 1e-3


def left_alone(rank, world_size):
    """Rank 1 dies; rank 2 hears of it and leaves; rank 0 waits for rank 2, which will never send."""
    axis = Mesh(dp=world_size)["dp"]
    comm.barrier(axis)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.recv(torch.empty(1), axis, (rank - 1) % world_size)
    except RuntimeError:
        return "lives"


@pytest.mark.timeout(60)  # where nobody hears, a call waits for 120 s
def test_who_waits_for_a_rank_that_has_left_hears_of_it(apart):
    assert survivors.together(apart, left_alone)[::2] == ["lives", "lives"]
