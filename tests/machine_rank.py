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

from gpt2lab.model import GPT2Config
from gpt2lab.plan import Plan, build
from gpt2lab.ranks import comm, environment
from gpt2lab.ranks.classes import receivers
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.train import Trainer
from gpt2lab.verify import axes, example_batch

PLAN = "dp=2,tp=2"
CONFIG = GPT2Config(vocab_size=64, n_positions=64, n_layer=4, n_head=4, n_embd=64)
ROWS, LENGTH, STEPS = 32, 64, 2


def batch():
    """The global batch of every step."""
    return example_batch(CONFIG, ROWS, LENGTH)


def on_the_wire() -> int:
    """Bytes that have left this machine so far."""
    wire = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{wire}/statistics/tx_bytes").read_text())


def crossing(log, mesh: Mesh, machines: list[int]) -> dict[str, int]:
    """Bytes that this rank's calls send to the other machine, by axis; `machines` says where each rank is."""
    axes, found = {a.name: a for a in mesh.all_axes()}, {}
    for event in log:
        targets = receivers(event.op, axes[event.axis]) if event.bytes else []
        away = sum(machines[t] != machines[mesh.rank] for t in targets)
        if away:
            found[event.axis] = found.get(event.axis, 0) + event.bytes * away // len(targets)
    return found


def measure(here: environment.Place) -> dict:
    """Some steps of the plan on this rank: losses, seconds a step, bytes that crossed as counted and on the wire."""
    machine = int(os.environ["GROUP_RANK"])
    with environment.joined(here):
        mesh = Mesh(**axes(Plan.parse(PLAN)))
        one = Trainer(build(Plan.parse(PLAN), CONFIG, mesh, torch.float64))
        losses = [one.step(batch()).loss]  # connections are made
        machines = [
            m for m, _ in sorted(comm.gather_objects((machine, here.rank), mesh.world), key=lambda x: x[1])
        ]
        comm.barrier(mesh.world)
        comm.clear_log()
        before, begin = on_the_wire(), time.perf_counter()
        losses += [one.step(batch()).loss for _ in range(STEPS)]
        log = list(comm.log)
        comm.barrier(mesh.world)
        seconds, after = time.perf_counter() - begin, on_the_wire()
    return {
        "machines": machines,
        "losses": losses,
        "seconds": seconds / STEPS,
        "wire": after - before,
        "crossing": crossing(log, mesh, machines),
    }


def main(folder: str) -> None:
    """Both placements, one after the other in the same processes."""
    here, machine = environment.place(), int(os.environ["GROUP_RANK"])
    found = {"inside": measure(here)}
    found["across"] = measure(replace(here, rank=2 * here.local_rank + machine, restarts=1))
    Path(folder, f"rank{here.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
