"""Lesson 17's explorer: the plan that the planner chooses, what binds it, and the plan run here on live ranks.

Small models are planned for nodes of two cores such as a laptop's, the others for GPUs such as an H100.
"""

from argparse import Namespace
from dataclasses import replace
from functools import cache
from pathlib import Path

from tqdm.auto import tqdm

from ...benchmarks import race
from ...benchmarks.calibration import plan_steps
from ...machine.links import Link, Network
from ...model import PRESETS
from ...planner.choose import Choice, Goal, in_seconds, parallelize
from ...planner.cost import predict, timetable
from ...planner.problem import Cluster, find_cluster
from ...plots.planner import explored
from ...processes.launch import Ranks
from ...ranks import paced
from ..display import static

SMALL = "nano", "mini"
RECORD = Path(__file__).with_name("plans.json")


def machine_of(model: str, devices: int, memory_GB: float, link_GBps: float) -> Cluster:
    """Two nodes of equally many devices, and a link of so many gigabytes a second between them."""
    kind = find_cluster("laptop" if model in SMALL else "h100x64")
    inside = kind.network.inside or kind.network.between
    network = Network(Link(inside.latency, 1e9 * link_GBps), inside, max(devices // 2, 1))
    device = replace(kind.device, memory=1e9 * memory_GB)
    return replace(kind, devices=devices, device=device, network=network)


def goal_of(model: str, rows: int, length: int) -> Goal:
    """The fastest step of so many rows; a sequence has at most the model's positions."""
    return Goal(rows, min(length, PRESETS[model].n_positions), itemsize=4 if model in SMALL else 2)


@cache
def chosen(model: str, devices: int, memory_GB: float, link_GBps: float, rows: int, length: int) -> Choice:
    """The planner's choice; a bar counts the plans that have been predicted. Raises ValueError where nothing fits."""
    bar = lambda plans: tqdm(plans, desc="plans predicted", leave=False, disable=static())
    machine = machine_of(model, devices, memory_GB, link_GBps)
    return parallelize(PRESETS[model], machine, goal_of(model, rows, length), bar)


def binds(choice: Choice, config, machine: Cluster, goal: Goal) -> dict[str, float]:
    """How many percent of the step are won if one thing is twice as good; memory: if there is enough of it."""
    device, network, now = machine.device, machine.network, choice.prediction.seconds
    twice = lambda link: Link(link.latency / 2, 2 * link.bandwidth)
    faster = replace(device, rate=2 * device.rate, copy=2 * device.copy, launch=device.launch / 2)
    better = {
        "devices": replace(machine, device=faster),
        "link between nodes": replace(machine, network=replace(network, between=twice(network.between))),
        "links inside": replace(machine, network=replace(network, inside=twice(network.inside))),
    }
    found = {
        what: predict(choice.plan, config, goal.rows, goal.length, other, goal.itemsize).seconds
        for what, other in better.items()
    }
    found["memory"] = min(one.prediction.seconds for one in choice.front)
    return {what: 100 * (1 - seconds / now) for what, seconds in found.items()}


def paced_step(rank: int, world: int, network: Network, asked: Namespace) -> tuple:
    """The turns of a step of a plan here, its messages delayed as on that network."""
    with paced.use(network):
        return race.on_rank(rank, world, plan_steps, asked, 2, 1)


def run_here(choice: Choice, config, machine: Cluster, goal: Goal) -> float:
    """Seconds of a step of the chosen plan on live ranks here, paced to the machine's links."""
    asked = Namespace(plan=str(choice.plan), config=config, rows=goal.rows, length=goal.length)
    with Ranks(choice.plan.world, echo=False, timeout=60) as ranks:
        found = race.Outcome.of(ranks.run(paced_step, machine.network, asked))
    return min(found.times["step"].trials)


def explorer(
    model: str, devices: int, memory_GB: float, link_GBps: float, rows: int, length: int, run_it: str = "no"
):
    """The picture: what is feasible, what binds, the plan's mesh and its clock; `run_it`: and how long it took here."""
    config, machine = PRESETS[model], machine_of(model, devices, memory_GB, link_GBps)
    goal = goal_of(model, rows, length)
    try:
        choice = chosen(model, devices, memory_GB, link_GBps, rows, length)
    except ValueError as error:
        return explored(str(error))
    title = f"{choice.plan}: {in_seconds(choice.prediction.seconds)} a step (predicted)"
    if run_it == "yes":
        small = model in SMALL and choice.plan.world <= 4
        seen = "too large to run here: take nano or mini, and four devices"
        if small:
            seen = f"{in_seconds(run_here(choice, config, machine, goal))} on live ranks here (paced)"
        title += f"; {seen}"
    if goal.length < length:
        title += f"\nrows of {goal.length} tokens, all that {model} has"
    clock = timetable(choice.plan, config, goal.rows, goal.length, machine, goal.itemsize)
    return explored(title, choice, machine.device.memory, binds(choice, config, machine, goal), clock)
