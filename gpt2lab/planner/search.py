"""Automatic parallelisation as one recipe: a space of plans, pruned by rules, searched, and each plan evaluated.

All planners look at the same `ChainProblem`, and end with a plan that the same clock times. What counts as one
evaluation is a plan that was timed, or for planners that solve parts, a part that was priced.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import exp, inf, prod
from random import Random
from types import SimpleNamespace

from ..machine.arguments import checked
from ..machine.patience import patiently
from ..sharding.staged import CutStage
from . import alpa, balance
from .cuts import Assignment, ChainPlan, ChainProblem, Clock
from .problem import OperatorGraph
from .reinforce import reinforce

Space = list[list[Assignment]]  # for each operator what may be chosen for it


class Judge:
    """The best `plan` so far and its `seconds` (None and infinite: nothing fits); a search calls it to time plans.

    `evaluations` counts them, `jobs` those that delta simulation timed. When the best so far became better, `trace` has
    (evaluations, seconds of the plan), `seen` the seconds that the search had taken; `took` are all of them.
    """

    def __init__(self, problem: ChainProblem, evaluate: Callable):
        self.problem, self.evaluate, self.begin = problem, evaluate, time.perf_counter()
        self.plan, self.seconds, self.evaluations, self.jobs, self.took = None, inf, 0, 0, 0.0
        self.trace, self.seen = [], []

    def __call__(self, plan: ChainPlan, seconds: float | None = None) -> float:
        """Seconds of a plan, timed here unless they are known."""
        seconds = self.evaluate(self.problem, plan) if seconds is None else seconds
        self.evaluations += 1
        if seconds < self.seconds:
            self.plan, self.seconds = tuple(plan), seconds
            self.trace.append((self.evaluations, seconds))
            self.seen.append(time.perf_counter() - self.begin)
        return seconds


@checked()
@dataclass(frozen=True)
class Planner:
    """A search space, rules that reduce it, a search through the rest, and what says how good a plan is."""

    space: Callable[[ChainProblem], Space]
    prune: Callable[[ChainProblem, Space], Space]
    search: Callable[[ChainProblem, Space, Judge], None]
    evaluate: Callable[[ChainProblem, ChainPlan], float] = ChainProblem.evaluate

    def plan(self, problem: ChainProblem) -> Judge:
        """The best plan that the search comes upon."""
        judge = Judge(problem, self.evaluate)
        self.search(problem, self.prune(problem, self.space(problem)), judge)
        judge.took = time.perf_counter() - judge.begin
        return judge


def soap(problem: ChainProblem) -> Space:
    """For each operator every block of devices and every cut on it."""
    return [[a for b in problem.blocks() for a in problem.assignments(n, b)] for n in range(len(problem))]


def everything(problem: ChainProblem, space: Space) -> Space:
    """No rule at all."""
    return space


@checked()
def only(rule: Callable[[ChainProblem, Assignment], bool]) -> Callable:
    """A pruning that keeps what a rule allows."""
    return lambda problem, space: [[a for a in row if rule(problem, a)] for row in space]


def one_device(problem: ChainProblem, at: Assignment) -> bool:
    """A placement: no operator is cut."""
    return at.count == 1


def whole_cluster(problem: ChainProblem, at: Assignment) -> bool:
    """Every operator is cut over all devices."""
    return at.count == problem.cluster.devices


def submesh(problem: ChainProblem, at: Assignment) -> bool:
    """Alpa's blocks: a power of two inside a node, or whole nodes."""
    return (at.first, at.count) in alpa.submeshes(problem.cluster.devices, problem.cluster.network.node)


def every_pipeline(problem: ChainProblem, space: Space) -> Iterator[ChainPlan]:
    """All plans that go through the devices in order, stage by stage, and use every device."""
    last = problem.cluster.devices

    def further(plan: ChainPlan) -> Iterator[ChainPlan]:
        end = plan[-1].first + plan[-1].count if plan else 0
        if len(plan) == len(space):
            if end == last:
                yield plan
            return
        for at in space[len(plan)]:
            if plan and at.devices == plan[-1].devices or at.first == end:
                yield from further((*plan, at))

    return further(())


def every_plan(problem: ChainProblem, space: Space) -> Iterator[ChainPlan]:
    """All plans of the space."""
    return product(*space)


@checked()
def exhaustive(plans: Callable = every_plan) -> Callable:
    """Time every plan."""

    def search(problem, space, judge):
        count = prod(map(len, space)) if plans is every_plan else None
        for plan in patiently(plans(problem, space), "plans", count):
            judge(plan)

    return search


@checked(change=(-float("inf"), float("inf")), scale=0, draw=(0, 1))
def accepts(change: float, scale: float, draw: float) -> bool:
    """Metropolis' rule: what is better always, what is worse with the chance exp(-change / scale)."""
    return change <= 0 or scale > 0 and draw < exp(-change / scale)


@checked(steps=1, heat=0)
def mcmc(steps: int = 2000, seed: int = 0, heat: float = 0.03) -> Callable:
    """FlexFlow's search: assign one operator anew, by chance, and keep that by Metropolis' rule.

    It starts with every operator whole on the first device; `heat` is in units of that plan's seconds. As long as no
    plan has fitted, it keeps a change after which the fullest device holds no more. A change is timed by delta
    simulation. Jia, Zaharia & Aiken 2019, "Beyond Data and Model Parallelism", section 6.
    """

    def search(problem, space, judge):
        draw = Random(seed)
        start = tuple(next((a for a in row if a.count == 1), row[0]) for row in space)
        clock, now = Clock(problem, start), judge(start)
        scale = heat * clock.seconds
        judge.jobs += clock.timed
        for _ in patiently(range(steps - 1), "changes of a plan"):
            n = draw.randrange(len(problem))
            other = clock.changed(n, draw.choice(space[n]))
            judge.jobs += other.timed
            fits = problem.cluster.device.memory == inf or problem.evaluate(other.plan) < inf
            seconds = judge(other.plan, other.seconds if fits else inf)
            if seconds < inf and accepts(seconds - now if now < inf else -1, scale, draw.random()):
                clock, now = other, seconds
            elif now == inf and max(problem.memory(other.plan)) <= max(problem.memory(clock.plan)):
                clock = other

    return search


def _learned(problem: ChainProblem, space: Space, judge: Judge) -> None:
    """REINFORCE of lesson 16 on the operators' devices; cuts inside operators are not among its actions."""
    on = [[a for a in row if a.count == 1] for row in space]
    plan = lambda where: tuple(row[device] for row, device in zip(on, where, strict=True))
    alone = [problem.work(n, row[0]) for n, row in enumerate(on)]
    known = cache(lambda where: judge(plan(where)))
    worst = 10 * sum(alone) * problem.micros
    view = SimpleNamespace(
        graph=OperatorGraph.chain(problem.operators),
        cluster=problem.cluster,
        times=[t * problem.micros for t in alone],
        cost=lambda where: min(known(tuple(where)), worst),
        fits=lambda where: known(tuple(where)) < inf,
    )
    reinforce(view, rounds=60)


def _chain_of(problem: ChainProblem) -> balance.Chain:
    """What PipeDream's and DAPPLE's planners see of a problem."""
    alone = [problem.work(n, Assignment(0, 1)) for n in range(len(problem))]
    return balance.Chain(
        tuple(t / 3 for t in alone),
        tuple(2 * t / 3 for t in alone),
        tuple(op.weights for op in problem.operators),
        tuple(op.output for op in problem.operators[:-1]),
        problem.links["x"].bandwidth,
    )


@checked()
def replicated(planner: Callable) -> Callable:
    """PipeDream's or DAPPLE's planner: stages of which each is replicated, so that its batch is cut.

    Where their plan asks for more replicas than a micro-batch has rows it has no seconds here.
    """

    def search(problem, space, judge):
        _, stages = planner(_chain_of(problem), problem.cluster.devices, problem.micros)
        plan, first = [], 0
        for stage in stages:
            mesh = problem.mesh(first, stage.replicas)
            cut = tuple("sample" if n > 1 else "whole" for n in mesh.values())
            plan += [Assignment(first, stage.replicas, cut)] * (stage.last - stage.first)
            first += stage.replicas
        legal = all(at in row for at, row in zip(plan, space, strict=True))
        judge(tuple(plan), None if legal else inf)

    return search


def halved(problem: ChainProblem, space: Space, judge: Judge) -> None:
    """Tofu's search: cut every operator along one axis by dynamic programming, then along the next, never looking back.

    `sharding.tofu` does the same with bytes on a captured graph.
    """
    done: list[list[tuple[str, ...]]] = [sorted({a.cut[:1] for a in row}) for row in space]
    for axis in range(2):
        best: dict[Assignment, tuple[float, ChainPlan]] = {}
        for n, cuts in enumerate(done):
            judge.evaluations += len(cuts)
            ends = [Assignment(0, problem.cluster.devices, (*cut, *["whole"] * (1 - axis))) for cut in cuts]
            best = {at: _cheapest(problem, n, at, best) for at in ends}
        plan = min(best.values(), key=lambda found: found[0])[1]
        before = [at.cut[: axis + 1] for at in plan]
        both = zip(space, before, strict=True)
        done = [sorted({a.cut for a in row if a.cut[:1] == cut}) for row, cut in both]
    judge(plan)


def _cheapest(problem, n, at, best):
    """(seconds, plan) of the operators up to n, of which the last is assigned so."""
    before = best or {None: (0.0, ())}
    options = ((seconds + problem.job(n, last, at), way) for last, (seconds, way) in before.items())
    seconds, way = min(options, key=lambda found: found[0])
    return seconds, (*way, at)


def _optimised(problem: ChainProblem, space: Space, judge: Judge) -> None:
    """Alpa's search: an integer program for every stage, and a dynamic program over stages."""
    plan, _, priced = alpa.fastest_pipeline(problem, space)
    judge.evaluations += priced
    if plan:
        judge(plan)


PLANNERS = {
    "exhaustive": Planner(soap, everything, exhaustive()),
    "every pipeline": Planner(soap, only(submesh), exhaustive(every_pipeline)),
    "MCMC (FlexFlow)": Planner(soap, everything, mcmc()),
    "learned placement": Planner(soap, only(one_device), _learned),
    "PipeDream": Planner(soap, everything, replicated(lambda chain, n, micros: balance.pipedream(chain, n))),
    "DAPPLE": Planner(soap, everything, replicated(balance.dapple)),
    "Tofu": Planner(soap, only(whole_cluster), halved),
    "Alpa": Planner(soap, only(submesh), _optimised),
}
"""Planners by name."""

LINK_NAMES = {"whole": "", "sample": "batch", "attribute": "seq"}


@checked(plan=0)
def stages_of(problem: ChainProblem, plan: ChainPlan) -> list[CutStage]:
    """The stages that `sharding.staged` runs, for operators that `gpt2_cuts` made, clustered or not."""
    found: list[CutStage] = []
    link, last = 0, sum(op.links for op in problem.operators) - 1
    for n, (op, at) in enumerate(zip(problem.operators, plan, strict=True)):
        shape = problem.mesh(at.first, at.count)
        own = [i for i, size in enumerate(shape.values()) if size > 1]
        mesh = {axis: size for axis, size in shape.items() if size > 1}
        choices = []
        for k in range(link, link + op.links):
            names = LINK_NAMES | {"parameter": "vocab" if k in (0, last) else "heads" if k % 2 else "ff"}
            choices.append(tuple(names[at.cut[i]] for i in own))
        if n and plan[n - 1].devices == at.devices:
            choices = [*found.pop().choices, *choices]
        found.append(CutStage(link + op.links - len(choices), tuple(choices), tuple(at.devices), mesh))
        link += op.links
    return found
