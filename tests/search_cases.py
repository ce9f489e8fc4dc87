"""Small random problems for the searches, and what brute force says about them."""

import itertools
import random
from functools import cache
from math import inf

from gpt2lab.machine.links import Link, Network
from gpt2lab.planner.cuts import ChainProblem, CutOperator
from gpt2lab.planner.events import Job, simulate_jobs
from gpt2lab.planner.graph_stages import StagePlan
from gpt2lab.planner.problem import Cluster, Device
from gpt2lab.planner.search import every_pipeline, only, soap, submesh


def random_problem(seed: int, operators: int = 3, devices: int = 4, memory: float = inf, cuts=None):
    """A chain of operators of any sizes on nodes of two devices."""
    draw = random.Random(seed)
    size = lambda top: 8 * draw.randint(1, top)
    chain = [
        CutOperator(
            f"o{n}", size(400), size(5), size(400), size(30), (size(80),) * draw.randint(1, 2), (size(40),), 4
        )
        for n in range(operators)
    ]
    slow, fast = Link(draw.choice([0, 5]), draw.choice([1, 2, 20])), Link(1, draw.choice([20, 200]))
    cluster = Cluster(devices, Device(1, memory, 1), Network(slow, fast, 2))
    cuts = cuts or draw.sample(["whole", "sample", "attribute", "parameter"], 2)
    return ChainProblem(tuple(chain), cluster, 4, 6, 8, draw.randint(2, 6), 8, tuple(cuts))


@cache
def pipelines(seed: int, operators: int = 3, memory: float = inf):
    """The best seconds of any pipeline, and of any plan that fits."""
    problem = random_problem(seed, operators, memory=memory)
    space = only(submesh)(problem, soap(problem))
    return min(map(problem.evaluate, every_pipeline(problem, space)))


def random_strategies(seed: int, operators: int):
    """(costs, changes, memory) of an integer program: a graph that need not be a chain."""
    draw = random.Random(seed)
    numbers = lambda count: [draw.randint(0, 20) for _ in range(count)]
    costs = [numbers(draw.randint(1, 3)) for _ in range(operators)]
    pairs = [p for p in itertools.combinations(range(operators), 2) if draw.random() < 0.6]
    changes = {(v, u): [numbers(len(costs[u])) for _ in costs[v]] for v, u in pairs}
    return costs, changes, [numbers(len(row)) for row in costs]


def brute_force(costs, changes, memory=(), limit=inf) -> float:
    """The least cost of all choices that fit."""
    best = inf
    for chosen in itertools.product(*(range(len(row)) for row in costs)):
        held = sum(row[i] for row, i in zip(memory, chosen, strict=False))
        if held <= limit:
            cost = sum(row[i] for row, i in zip(costs, chosen, strict=True))
            best = min(best, cost + sum(m[chosen[v]][chosen[u]] for (v, u), m in changes.items()))
    return best


def one_device_each(seconds, memory, limit: float):
    """`piper` options for stages on one device, of any `seconds(stage)`, whose `memory` stays within the limit."""

    def options(stage, behind):
        if sum(memory[n] for n in stage) <= limit:
            yield 1, StagePlan(tuple(sorted(stage)), seconds=seconds(stage))

    return options


def ring_all_reduce(ranks, size, cluster: Cluster):
    """A ring all-reduce of `size` bytes in as many equal chunks as ranks, message by message."""
    n, jobs = len(ranks), []
    for step in range(2 * (n - 1) + 1):
        for place, rank in enumerate(ranks):
            needs = ((n * (step - 1) + (place - 1) % n, size / n),) if step else ()
            jobs.append(Job(f"step {step}", rank, 0, needs))
    return simulate_jobs(jobs, cluster)
