"""How fast this machine computes and sends, fitted to whole steps of small models and to sums between live ranks.

Operations and bytes per second of a rank and the launch of an operator are those with which the planner's own formulas
come nearest to the measured steps. Up to four cores work while a step is timed, as in a parallel run. Last, a few
plans of 1, 2 and 4 ranks say how much longer whole steps take than that: a core alone is faster, more ranks than cores
are slower.
"""

import hashlib
import json
import os
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np
import torch
from tqdm import tqdm

from ..corpus.storage import cache_dir, read_json
from ..machine import memory as counted
from ..machine.links import Link, Network
from ..machine.speed import machine
from ..model import PRESETS
from ..plan import Plan, build
from ..planner.cost import predict
from ..planner.fit import fit
from ..planner.problem import TORCH_ADDS, Cluster, Device, find_cluster
from ..processes.launch import Ranks
from ..ranks import comm
from ..ranks.mesh import Mesh
from ..reference import example_batch
from ..train import Trainer
from . import race
from .race import Contest

NARROW, WIDE = 4_000, 50_257  # words: blocks weigh as much as the head, or the head and its table weigh most
STEPS = [  # (plan, configuration, rows, length, words): from many small operators to few large ones
    ("serial", "nano", 1, 16, NARROW),
    ("serial", "nano", 2, 64, NARROW),
    ("micro=4", "nano", 4, 64, NARROW),
    ("serial", "mini", 1, 32, NARROW),
    ("serial", "mini", 2, 128, NARROW),
    ("recompute=on", "mini", 4, 64, NARROW),
    ("loss=chunked", "mini", 4, 128, NARROW),
    ("micro=4", "mini", 4, 32, NARROW),
    ("serial", "nano", 1, 16, WIDE),
    ("micro=2", "nano", 4, 64, WIDE),
    ("serial", "mini", 1, 64, WIDE),
    ("serial", "mini", 2, 64, WIDE),
]
TOGETHER = {  # plans by ranks, of a step that no benchmark takes
    1: ["serial", "micro=2"],
    2: ["dp=2,zero=2", "tp=2", "cp=2", "pp=2,micro=4"],
    4: ["dp=2,tp=2", "cp=4", "pp=2,dp=2,micro=2", "cp=2,tp=2,micro=2,zero=3"],
}
STEP = "mini", 4, 48, WIDE  # their configuration, rows, length and words
SAID = "plan", "config", "rows", "length", "words", "seconds"
SIZES = 1 << 10, 1 << 14, 1 << 18, 1 << 22  # numbers of a sum between ranks
AMID, COUNT = 1 << 14, 20  # numbers of a sum that is timed amid work, and how many there are


def calibration_file() -> Path:
    """Where the measurement of this machine is kept: its name is the fingerprint of the machine."""
    # what was kept in the form before lacks `slowed`
    said = json.dumps({k: v for k, v in machine().items() if k != "GPUs"} | {"form": 2}, sort_keys=True)
    return cache_dir("calibration") / f"{hashlib.sha256(said.encode()).hexdigest()[:16]}.json"


def known() -> dict:
    """The numbers of this machine as it was measured; where it was not, the round ones of `CLUSTERS["laptop"]`."""

    def whole(found: dict) -> dict:
        cluster_of(found)
        return found

    if calibration_file().exists():
        again = "is damaged. Measure again: gpt2lab calibrate --again."
        return read_json(calibration_file(), whole, again)
    laptop = find_cluster("laptop")
    device, link = laptop.device, laptop.network.between
    found = {"cores": laptop.cores, "rate": device.rate, "copy": device.copy, "launch": device.launch}
    return found | {"latency": link.latency, "bandwidth": link.bandwidth}


def here() -> Cluster:
    """This machine, as four devices that share its cores and its memory."""
    return cluster_of(known(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 4)


def cluster_of(found: dict, memory: float = float("inf")) -> Cluster:
    """The machine with these numbers of `measured`, as four devices that share its cores."""
    device = Device(found["rate"], memory, found["launch"], found["copy"], add=TORCH_ADDS)
    network = Network(Link(found["latency"], found["bandwidth"]), node=64)
    laptop = find_cluster("laptop")
    source = f"{laptop.source}; gpt2lab calibrate measures this machine"
    if off := [abs(step["fitted"] / step["seconds"] - 1) for step in found.get("steps", ())]:
        source = (
            f"measured here; of the {len(off)} steps that it is fitted to half are within {median(off):.0%}"
        )
    slowed = tuple((int(ranks), factor) for ranks, factor in found.get("slowed", {}).items())
    return Cluster(4, device, network, found["cores"], source, found.get("call", laptop.call), slowed)


def measured() -> dict:
    """The numbers of this machine, from live ranks: one for each core, two at least and four at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = max(2, min(cores, 4))
    with Ranks(ranks, echo=False, timeout=120) as pool:
        timed = [step_seconds(pool, *step) for step in tqdm(STEPS, desc="steps", leave=False)]
        took = fastest_turns(pool, sums)
    steps = [dict(zip(SAID, (*step, s), strict=True)) for step, s in zip(STEPS, timed, strict=True)]
    rate, copy, launch = fitted(steps)
    crowd, messages, share = max(1.0, ranks / cores), 2 * (ranks - 1), 2 * (ranks - 1) / ranks * 4
    link = fit([(messages * crowd, crowd * share * size, took[size]) for size in SIZES]).link
    amid = (took["work and sums"] - took["work"]) / COUNT
    call = max(0.0, amid / crowd - link.time(share * AMID, messages))
    found = {"cores": cores, "rate": rate, "copy": copy, "launch": launch, "call": call}
    for step in steps:
        step["fitted"] = float(features(step) @ (1 / rate, 1 / copy, launch))
    found |= {"latency": link.latency, "bandwidth": link.bandwidth, "steps": steps}
    return found | {"slowed": slowed(cluster_of(found))}


def slowed(cluster: Cluster) -> dict[str, float]:
    """How many times as long as predicted for the cluster the steps of `TOGETHER` take here, by ranks."""
    name, rows, length, words = STEP
    config, found = replace(PRESETS[name], vocab_size=words), {}
    for ranks, plans in tqdm(TOGETHER.items(), desc="plans", leave=False):
        with Ranks(ranks, echo=False, timeout=120) as pool:
            seconds = [step_seconds(pool, plan, *STEP) for plan in plans]
        said = [predict(Plan.parse(plan), config, rows, length, cluster).seconds for plan in plans]
        found[str(ranks)] = geometric_mean(np.divide(seconds, said))
    return found


def features(step: dict) -> np.ndarray:
    """(operations, bytes moved, operators) of a step, by the planner's own formulas: one device that takes 1 s each."""
    config = replace(PRESETS[step["config"]], vocab_size=step.get("words", NARROW))
    asked, none = (Plan.parse(step["plan"]), config, step["rows"], step["length"]), float("inf")
    units = Device(1.0, copy=none), Device(none, copy=1.0, add=TORCH_ADDS), Device(none, launch=1.0)
    return np.array([predict(*asked, Cluster(1, unit)).seconds for unit in units])


def fitted(steps: list[dict]) -> tuple[float, float, float]:
    """(operations a second, bytes a second, seconds an operator) with the least relative errors, none negative."""
    from scipy.optimize import nnls

    table = np.array([features(step) / step["seconds"] for step in steps])
    scale = table.max(0)
    solved = nnls(table / scale, np.ones(len(table)))[0] / scale
    costs = np.maximum(solved, 1e-15)
    return 1 / costs[0], 1 / costs[1], float(costs[2])


def step_seconds(pool: Ranks, plan: str, name: str, rows: int, length: int, words: int) -> float:
    """The fastest of some steps of a plan."""
    config = replace(PRESETS[name], vocab_size=words)
    asked = Namespace(plan=plan, config=config, rows=rows, length=length)
    return fastest_turns(pool, plan_steps, asked)["step"]


def fastest_turns(pool: Ranks, contest, args=None) -> dict[str, float]:
    """Seconds of each contestant's fastest turn: others on the machine only slow them."""
    found = race.Outcome.of(pool.run(race.on_rank, contest, args, rounds=8, warm_up=2))
    return {name: min(times.trials) for name, times in found.times.items()}


def plan_steps(rank: int, world: int, args) -> Contest:
    """Steps of a plan; one for a single rank runs on every rank at the same time. The fact is the most bytes held."""
    plan = Plan.parse(args.plan)
    mesh = Mesh(alone=True) if plan.world == 1 else Mesh(**plan.axes)
    trainer = Trainer(build(plan, args.config, mesh))
    batch = example_batch(args.config, args.rows, args.length)
    held = lambda: {"step": {"bytes held": max(counted.over_a_step(trainer, batch))}}
    return Contest({"step": lambda: trainer.step(batch)}, facts=held)


def sums(rank: int, world: int, _) -> Contest:
    """Sums of some sizes over all ranks; and work, of which some ranks have more than others, without and with sums."""
    everyone, x, matrix = Mesh(dp=world)["dp"], torch.ones(AMID), torch.ones(256, 256)

    def work(sums: bool):
        for turn in range(COUNT):
            # without sums every rank works as long as the slower one
            for _ in range(2 - (rank + turn) % 2 * sums):
                matrix @ matrix
            if sums:
                comm.all_reduce(x, everyone)

    ways = {size: partial(comm.all_reduce, torch.ones(size), everyone) for size in SIZES}
    return Contest(ways | {"work": partial(work, False), "work and sums": partial(work, True)})
