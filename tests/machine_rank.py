"""What one rank does on two machines: the same steps in two placements, timed, its bytes and those on the wire counted.

    torchrun --nnodes 2 --nproc-per-node 2 tests/machine_rank.py FOLDER

Ranks number the places of the mesh, in which tensor parallelism is innermost. torchrun numbers machine by machine, so
tensor parallelism stays inside; with the ranks dealt out in turn, it goes across. Everything else is the same.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from gpt2lab.machine import namespaces
from gpt2lab.machine.links import Link, Network
from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.processes import launchers
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.ranks.node_traffic import BETWEEN, by_class, price
from gpt2lab.reference import example_batch
from gpt2lab.train import Trainer

PLAN = "dp=2,tp=2"
WIRE = namespaces.Wire.parse("100mbit,0.1ms")
CONFIG = GPT2Config(vocab_size=64, n_positions=64, n_layer=4, n_head=4, n_embd=64)
ROWS, LENGTH, STEPS = 32, 64, 2
MEMORY, HALF_A_WIRE = (
    Link(0.0, 1e12),
    Link(0.0, WIRE.rate / 8 / 2),
)  # two ranks share the way out of a machine


def batch():
    """The global batch of every step."""
    return example_batch(CONFIG, ROWS, LENGTH)


def measure(here: launchers.Launched) -> dict:
    """Some steps of the plan on this rank: losses, seconds a step, bytes that crossed as counted and on the wire."""
    machine = int(os.environ["GROUP_RANK"])
    with launchers.process_group(here):
        mesh = Mesh(**Plan.parse(PLAN).axes)
        one = Trainer(build(Plan.parse(PLAN), CONFIG, mesh, torch.float64))
        losses = [one.step(batch()).loss]  # connections are made
        machines = [
            m for m, _ in sorted(comm.gather_objects((machine, here.rank), mesh.world), key=lambda x: x[1])
        ]
        comm.barrier(mesh.world)
        comm.clear_log()
        before, begin = namespaces.sent(), time.perf_counter()
        losses += [one.step(batch()).loss for _ in range(STEPS)]
        log = list(comm.log)
        comm.barrier(mesh.world)
        seconds, after = time.perf_counter() - begin, namespaces.sent()
    return {
        "machines": machines,
        "losses": losses,
        "seconds": seconds / STEPS,
        "price": price(log, mesh.rank, Network.placed(machines, MEMORY, HALF_A_WIRE)) / STEPS,
        "wire": after - before,
        "crossing": {
            a: size for (a, kind), size in by_class(log, mesh.rank, machines).items() if kind == BETWEEN
        },
    }


def main(folder: str) -> None:
    """Both placements, one after the other in the same processes."""
    here, machine = launchers.launched(), int(os.environ["GROUP_RANK"])
    found = {"inside": measure(here)}
    found["across"] = measure(replace(here, rank=2 * here.local_rank + machine, restarts=1))
    Path(folder, f"rank{here.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
