"""How many files a reader opens: counted by the interpreter, so that a detour shows up as a number."""

import pytest
import torch
from planting import planted
from test_architecture import NAMES, inside, room
from walk import entered

from gpt2lab.plan import Plan, build
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import CONFIG, example_batch
from gpt2lab.train import Trainer
from gpt2lab.transport.engine import ProgressEngine


def walks(rank, world_size):
    """The files that a warm all-reduce, a message, and a step of dp=2 enter on this rank."""
    axis, x = Mesh(dp=world_size)["dp"], torch.ones(10)
    trainer, batch = Trainer(build(Plan(dp=2), CONFIG, Mesh(dp=2))), example_batch(CONFIG, 7, 11)
    acts = {
        "all_reduce": lambda: comm.all_reduce(x, axis),
        "reduce_from": lambda: comm.reduce_from(x, axis),
        "ring_shift": lambda: comm.ring_shift(x, axis),
        "step": lambda: trainer.step(batch),
    }
    for act in acts.values():
        act()
    # whether the others still live is looked at now and then, after a long wait
    with planted(ProgressEngine, "_check_peers", lambda _: lambda engine: None):
        return {name: entered(act) for name, act in acts.items()}


@pytest.fixture(scope="module")
def walked(pools):
    return pools[2].run(walks)[0]


def without_transport(files):
    return [name for name in files if room(name) != "transport"]


@pytest.mark.parametrize(("act", "until_torch", "in_all"), [
    ("all_reduce", 4, 10),
    ("reduce_from", 4, 10),
    ("ring_shift", 6, 12),
    ("step", 16, 22),
])  # fmt: skip
def test_a_reader_opens_few_files(act, until_torch, in_all, walked):
    files = walked[act]
    print(f"\n{act}: {len(without_transport(files))} until torch.distributed, {len(files)} in all", *files)
    assert len(without_transport(files)) <= until_torch
    assert len(files) <= in_all


def test_a_detour_is_seen():
    """The walk's own eyes."""
    assert entered(lambda: Plan.parse("dp=2")) == ["machine/arguments", "plan"]
    assert entered(lambda: None) == []


def test_no_two_files_of_ranks_import_each_other_in_a_circle():
    files = [n for n in NAMES if room(n) == "ranks"]
    below = {n: inside(n) & set(files) for n in files}
    while done := [n for n in below if not below[n] & below.keys()]:
        for name in done:
            del below[name]
    assert not below, "these import each other"
