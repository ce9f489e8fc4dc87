"""Bugs in the searches: each is noticed by exhaustive search, by a full simulation, or by a number by hand."""

import random

import pytest
from planting import planted
from search_cases import brute_force, pipelines, random_problem, random_strategies

from gpt2lab.machine.links import Link, Network
from gpt2lab.planner import alpa, cuts, search
from gpt2lab.planner.cuts import Assignment, ChainProblem, Clock, CutOperator
from gpt2lab.planner.problem import Cluster, Device
from gpt2lab.sharding import crossing
from gpt2lab.sharding.crossing import Crossing, Side
from gpt2lab.sharding.layout import layouts

pytestmark = pytest.mark.mutant

LIMITS = {0: 16_000, 1: 16_000, 3: 8_000}
WANT = {seed: pipelines(seed) for seed in (3, 4, 16)}
LIMITED = {seed: pipelines(seed, memory=memory) for seed, memory in LIMITS.items()}


def alpa_is_wrong():
    """Another result than exhaustive search, or seconds that the clock does not see."""
    for seed, want in WANT.items():
        problem = random_problem(seed)
        found = alpa.fastest_pipeline(problem, search.only(search.submesh)(problem, search.soap(problem)))
        if abs(found.seconds - want) > 1e-9 * want or found.plan is None:
            return True
        if abs(problem.evaluate(found.plan) - want) > 1e-9 * want:
            return True
    return False


def memory_is_wrong():
    for seed, memory in LIMITS.items():
        problem = random_problem(seed, memory=memory)
        found = search.PLANNERS["Alpa"].plan(problem)
        if found.seconds != LIMITED[seed] and abs(found.seconds - LIMITED[seed]) > 1e-9 * LIMITED[seed]:
            return True
    return False


def program_is_wrong():
    for seed in range(4):
        costs, changes, memory = random_strategies(seed, 4)
        limit = sum(map(max, memory)) // 2
        given = costs, changes, memory, limit
        if alpa.intra_operator(costs, changes)[0] != brute_force(costs, changes):
            return True
        if alpa.intra_operator(*given)[0] != brute_force(*given):
            return True
    return False


def delta_is_wrong():
    problem, draw = random_problem(1, 6), random.Random(1)
    space = search.soap(problem)
    clock = Clock(problem, tuple(draw.choice(row) for row in space))
    for _ in range(20):
        n = draw.randrange(6)
        clock = clock.changed(n, draw.choice(space[n]))
        if clock.ends != Clock(problem, clock.plan).ends:
            return True
    return False


def walk_is_wrong():
    """Where MCMC surely comes to the optimum of 1,600 plans, it does not."""
    problem = random_problem(1, 2)
    best = search.Planner(search.soap, search.everything, search.exhaustive()).plan(problem).seconds
    return search.PLANNERS["MCMC (FlexFlow)"].plan(problem).seconds > best * (1 + 1e-9)


def rule_is_wrong():
    return not search.accepts(-1, 1, 0.99) or search.accepts(1, 1, 0.37) or not search.accepts(1, 1, 0.36)


def clusters_are_wrong():
    flops, outputs = [1, 1, 1, 1, 1, 1], [9, 9, 1, 9, 1, 1]
    return tuple(alpa.cluster_bounds(flops, outputs, 2)) != (0, 3, 6)


def count_is_wrong():
    """Two operators on two devices of a node: one stage with 3 x 3 cuts, or two stages without any."""
    return alpa.count_pipelines(2, 2, 2, 3) != 10


def one_operator(memory=float("inf")):
    network = Network(Link(0, 10), Link(0, 40), 2)
    ops = [CutOperator(str(n), 120, 80, 160, 16, (80,), (), 4) for n in range(2)]
    return ChainProblem(tuple(ops), Cluster(4, Device(10, memory)), 4, 6, 8, 2, 8), network


def by_hand():
    problem, network = one_operator()
    cluster = Cluster(4, Device(10), network)
    return ChainProblem(problem.operators, cluster, 4, 6, 8, 2, 8)


def price_is_wrong():
    """36 s of work halved; 160 bytes of gradients summed at 40 bytes/s for two micro-batches, or 80 bytes each time."""
    problem, pair = by_hand(), lambda cut: Assignment(0, 2, ("whole", cut))
    return (problem.work(0, pair("sample")), problem.work(0, pair("parameter"))) != (18 + 2, 18 + 2)


def change_is_wrong():
    """From cut rows to whole ones: half of 4 x 6 x 8 numbers of 8 bytes gathered; the way back is a slice."""
    pair = ("whole", "sample"), ("whole", "attribute")
    there = by_hand().change(pair[0], ("whole", "whole"), (0, 2))
    return (there, by_hand().change(*pair, (0, 2))) != (768 / 40, 2 * 384 / 40)


def entry_is_wrong():
    """36 s of work, and 80 bytes there and back: at 40 bytes/s inside a node, at 10 between nodes."""
    job = lambda first: by_hand().job(1, Assignment(0, 1), Assignment(first, 1))
    return (job(1), job(2)) != (36 + 4, 36 + 16)


def held_is_wrong():
    """Four times 160 bytes of state; 16 bytes kept of two micro-batches on the first of two stages."""
    return by_hand().memory((Assignment(0, 1), Assignment(1, 1))) != [640 + 32, 640 + 16, 0, 0]


def border_is_wrong():
    sides = Side((0, 1), {"y": 2}, layouts(2, "y", ())[0]), Side((2, 3), {"y": 2}, layouts(2, "y", ())[1])
    sent = list(Crossing((5, 4), 8, *sides).pieces())
    sizes = [crossing._size(box) for _, _, box in sent]
    return sizes != [12, 8] or [s for s, _, _ in sent] != [0, 1]


def copies_are_sent():
    sides = Side((0,), {}, layouts(2, "", ())[0]), Side((2, 3), {"y": 2}, layouts(2, "y", ())[0])
    return Crossing((5, 4), 8, *sides).cost(0) != (5 * 4 * 8, 2)


def stuck(right):
    """Metropolis' rule with the sign turned round."""
    return lambda change, scale, draw: change > 0


def own_jobs_only(right):
    def changed(self, number, at):
        other, count = right(self, number, at), len(self.plan)
        full = [
            e if i % count == number else old
            for i, (e, old) in enumerate(zip(other.ends, self.ends, strict=True))
        ]
        other.ends = full
        return other

    return changed


def no_changes(right):
    return lambda costs, changes, *rest: right(costs, {}, *rest)


def no_memory(right):
    return lambda costs, changes, memory=(), limit=0: right(costs, changes)


def entry_is_free(right):
    return lambda self, number, at, near: 0.0


BUGS = {
    "t_max does not limit the stages": (
        alpa,
        "_stages_below",
        lambda right: lambda stages, price, limit, *rest: right(stages, price, float("inf"), *rest),
        alpa_is_wrong,
    ),
    "only one t_max is tried": (
        alpa,
        "fastest_pipeline",
        lambda right: lambda problem, space: right(problem, space, gap=1e9),
        alpa_is_wrong,
    ),
    "whole nodes are no submeshes": (
        alpa,
        "submeshes",
        lambda right: lambda n, node: [b for b in right(n, node) if b[1] < node],
        alpa_is_wrong,
    ),
    "a submesh may begin inside another node": (
        cuts,
        "block_mesh",
        lambda right: lambda first, count, node: {"x": 1, "y": count},
        alpa_is_wrong,
    ),
    "entering a stage is free": (ChainProblem, "enter", entry_is_free, entry_is_wrong),
    "the integer program ignores changes of layout": (alpa, "intra_operator", no_changes, program_is_wrong),
    "the integer program ignores memory": (alpa, "intra_operator", no_memory, memory_is_wrong),
    "micro-batches in flight are forgotten": (
        ChainProblem,
        "held",
        lambda right: lambda self, n, at, behind: right(self, n, at, 0),
        held_is_wrong,
    ),
    "only the changed operator is timed again": (Clock, "changed", own_jobs_only, delta_is_wrong),
    "the clock waits for the input only": (
        cuts,
        "_waits",
        lambda right: lambda plan: [(1,) if n else () for n in range(len(plan))],
        alpa_is_wrong,
    ),
    "only worse plans are accepted": (search, "accepts", stuck, rule_is_wrong),
    "every plan is accepted": (search, "accepts", lambda right: lambda *given: True, rule_is_wrong),
    "MCMC changes only the first operator": (
        search,
        "Random",
        lambda right: lambda seed: first_only(right(seed)),
        walk_is_wrong,
    ),
    "clusters have equal counts of bytes": (
        alpa,
        "cluster_bounds",
        lambda right: (
            lambda flops, outputs, layers, slack=0.5: (
                right(flops, [1] * len(outputs), layers, 1.0)[:1] + (2, 6)
            )
        ),
        clusters_are_wrong,
    ),
    "an operator has one cut for all axes": (
        alpa,
        "block_mesh",
        lambda right: lambda *block: {"y": 1},
        count_is_wrong,
    ),
    "sums of gradients are free": (
        ChainProblem,
        "_sum",
        lambda right: lambda self, size, *rest, half=False: 0.0,
        price_is_wrong,
    ),
    "a gradient does not go back": (
        ChainProblem,
        "change",
        lambda right: lambda self, *given: right(self, *given) / 2,
        change_is_wrong,
    ),
    "boxes that overlap are not all sent": (
        Crossing,
        "pieces",
        lambda right: lambda self: list(right(self))[:1],
        border_is_wrong,
    ),
    "copies cross the border": (
        Crossing,
        "arrival",
        lambda right: property(lambda self: self.target),
        copies_are_sent,
    ),
}


def first_only(draw):
    draw.randrange = lambda n: 0
    return draw


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_noticed(name):
    owner, attribute, make, check = BUGS[name]
    assert not check(), "the check must pass without the bug"
    with planted(owner, attribute, make):
        assert check()
