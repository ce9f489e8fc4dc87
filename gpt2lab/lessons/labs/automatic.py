"""Lesson 17's problem, its five plans, and plans timed on live ranks over a paced network."""

import math

from ...machine.links import Link, Network
from ...model import GPT2Config
from ...planner.alpa import clustered
from ...planner.cuts import Assignment, ChainPlan, ChainProblem, gpt2_cuts
from ...planner.problem import Cluster, Device
from ...ranks import comm, paced
from ...reference import example_batch, example_weights
from ...sharding.run_staged import StageRunner
from ...sharding.staged import Staged
from .instruments import bytes_sent, seconds_of

MODEL = GPT2Config(vocab_size=1000, n_positions=64, n_layer=4, n_head=4, n_embd=256)
"""The model of the searches: four clusters of about equal work."""
LIVE = GPT2Config(vocab_size=40, n_positions=16, n_layer=2, n_head=4, n_embd=32)
"""The model of the live runs."""
WORDS = {"whole": "-", "sample": "S", "attribute": "A", "parameter": "P"}


def problem(
    slow: float = 50e6, devices: int = 4, memory: float = math.inf, rows: int = 4, micros: int = 8, **more
):
    """`MODEL` (or `config`) in `layers` clusters on two nodes, whose devices share links of 2 GB/s."""
    config, length = more.pop("config", MODEL), more.pop("length", 32)
    operators = clustered(gpt2_cuts(config, rows, length), more.pop("layers", 4))
    network = Network(Link(100e-6, slow), Link(20e-6, 2e9), max(devices // 2, 1))
    cuts = more.pop("cuts", ("sample", "attribute", "parameter"))
    device = Device(20e9, memory, 20e-6)
    return ChainProblem(
        operators, Cluster(devices, device, network), rows, length, config.n_embd, micros, cuts=cuts
    )


def words(plan: ChainPlan) -> str:
    """A plan in short: the cut of every operator (S rows, A tokens, P weights; - none), a bar between stages."""
    said = []
    for n, at in enumerate(plan):
        if n and plan[n - 1].devices != at.devices:
            said.append("|")
        said.append("".join(WORDS[cut] for cut in at.cut))
    return " ".join(said)


def plan_family(plan: ChainPlan) -> str:
    """Which family a plan belongs to."""
    if len({at.first for at in plan}) > 1:
        return "stages" if all(at.count == 1 for at in plan) else "stages, cut inside"
    return "cut over all devices"


LIVE_NETWORK = Network(Link(100e-6, 2e6), Link(50e-6, 40e6), 2)


def five_plans(given: ChainProblem) -> dict[str, ChainPlan]:
    """Plans for four devices among which to guess the best one."""
    n, half = len(given), len(given) // 2
    alike = lambda x, y: (Assignment(0, 4, (x, y)),) * n
    pair = lambda first, cut: (Assignment(first, 2, ("whole", cut)),)
    return {
        "data parallel": alike("sample", "sample"),
        "tensor parallel": alike("parameter", "parameter"),
        "data between, tensor inside": alike("sample", "parameter"),
        "two stages, data inside": pair(0, "sample") * half + pair(2, "sample") * (n - half),
        "two stages, tensor inside": pair(0, "parameter") * half + pair(2, "parameter") * (n - half),
    }


def run_plans(
    rank: int, world_size: int, plans: dict[str, Staged], rows: int, length: int, micros: int, turns=2
):
    """For each plan (seconds of the fastest of some steps over the paced network, loss, bytes sent, as predicted)."""
    batch = example_batch(LIVE, rows * micros, length)
    pairs = zip(batch.tokens.split(rows), batch.targets.split(rows), strict=True)
    batches = [{"tokens": tokens, "targets": targets} for tokens, targets in pairs]
    weights, found = example_weights(LIVE), {}
    for name, staged in plans.items():
        idle = world_size - sum(len(stage.ranks) for stage in staged.stages)
        runner, results = StageRunner(staged, idle), {}
        step = lambda runner=runner, results=results: results.update(runner.step(weights, batches))
        ready = lambda runner=runner: (comm.barrier(runner.world), comm.clear_log())
        with paced.use(LIVE_NETWORK):
            best = min(seconds_of(step, turns, 0, ready))
        loss = results["loss"].item() if "loss" in results else None
        found[name] = best, loss, bytes_sent(), bytes_sent() == staged.cost(rank, micros)[0]
    return found
