"""All searches on one problem: none beats the exhaustive one, and those that are exact reach it."""

import itertools
import random
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from search_cases import brute_force, pipelines, random_problem, random_strategies

from gpt2lab.machine.links import Link, Network
from gpt2lab.model import GPT2Config
from gpt2lab.planner import alpa
from gpt2lab.planner.balance import every_cut
from gpt2lab.planner.cuts import Assignment, ChainProblem, Clock, CutOperator, gpt2_cuts, merged
from gpt2lab.planner.events import Job, simulate_jobs
from gpt2lab.planner.problem import Cluster, Device, gpt2_layers
from gpt2lab.planner.search import (
    PLANNERS,
    Planner,
    accepts,
    every_pipeline,
    everything,
    exhaustive,
    mcmc,
    one_device,
    only,
    soap,
    submesh,
)
from gpt2lab.sharding.gpt2 import captured_gpt2
from gpt2lab.sharding.tofu import LinkChain

CONFIG = GPT2Config(vocab_size=37, n_positions=12, n_layer=1, n_head=4, n_embd=24)
KINDS = {"sample": ["batch"] * 4, "attribute": ["seq"] * 4, "parameter": ["vocab", "heads", "ff", "vocab"]}


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_a_cut_sends_is_what_the_partitioned_program_sends(ranks):
    """By formula and counted; the head's program also sums its loss, one number."""
    links, operators = LinkChain(captured_gpt2(CONFIG, 8, 12)), gpt2_cuts(CONFIG, 8, 12, itemsize=8)
    both = lambda sizes: sum(2 * (ranks - 1) * size for size in sizes)
    for kind, names in KINDS.items():
        counted = [links.inside(n, (name,), {"y": ranks}) for n, name in enumerate(names)]
        for op, size in zip(operators, counted, strict=True):
            want = both(op.summed) if kind == "parameter" else both([op.weights])
            want += both(op.gathered) // 2 if kind == "attribute" else 0
            scalar = both([8]) if op.name == "head" else 0
            assert want <= size <= want + scalar, (kind, op.name)


def test_operators_join_to_the_layers_of_the_coarser_graph():
    fine, coarse = gpt2_cuts(CONFIG, 8, 12), gpt2_layers(CONFIG, 8, 12).operators
    numbers = lambda op: (op.flops, op.kept, op.output, op.weights)
    assert [numbers(op) for op in (fine[0], merged(fine[1:3]))] == [numbers(op) for op in coarse[:2]]
    copy = 4 * 37 * 24  # the head counts its own copy of the words, because it may be on another block
    assert numbers(fine[3]) == (*numbers(coarse[2])[:3], coarse[2].weights + copy)


def all_pipelines(problem):
    return list(every_pipeline(problem, only(submesh)(problem, soap(problem))))


@pytest.mark.parametrize("seed", range(3))
def test_the_clock_of_a_pipeline_is_the_closed_form(seed):
    problem = random_problem(seed)
    for plan in random.Random(seed).sample(all_pipelines(problem), 40):
        jobs = Clock(problem, plan).jobs
        ends = [0, *(n for n in range(1, 3) if plan[n].devices != plan[n - 1].devices), 3]
        stages = [sum(jobs[a:b]) for a, b in pairwise(ends)]
        assert problem.evaluate(plan) == pytest.approx(sum(stages) + (problem.micros - 1) * max(stages))


@pytest.mark.parametrize("seed", range(4))
def test_the_clock_agrees_with_that_of_jobs_and_messages(seed):
    problem, draw = random_problem(seed, 5), random.Random(seed)
    space = only(one_device)(problem, soap(problem))
    plan = tuple(draw.choice(row) for row in space)
    clock = Clock(problem, plan)
    jobs = [
        Job(str(m), plan[n].first, clock.jobs[n], ((5 * m + n - 1, 0),) if n else ())
        for m in range(problem.micros)
        for n in range(5)
    ]
    assert clock.seconds == pytest.approx(simulate_jobs(jobs, Cluster(4, Device(1))).makespan)


@pytest.mark.parametrize("seed", range(4))
def test_delta_simulation_equals_full_simulation_and_times_fewer_jobs(seed):
    problem, draw = random_problem(seed, 6), random.Random(seed)
    space = soap(problem)
    clock, few, all_ = Clock(problem, tuple(draw.choice(row) for row in space)), 0, 0
    for _ in range(60):
        n = draw.randrange(6)
        other = clock.changed(n, draw.choice(space[n]))
        full = Clock(problem, other.plan)
        assert other.ends == full.ends
        few, all_ = few + other.timed, all_ + full.timed
        clock = other if draw.random() < 0.5 else clock
    assert few < all_


@pytest.mark.parametrize("seed", [0, 3, 4, 7, 16])
def test_no_search_beats_the_exhaustive_one_and_alpa_reaches_it(seed):
    problem = random_problem(seed)
    space = only(submesh)(problem, soap(problem))
    among_all = Planner(soap, only(submesh), exhaustive()).plan(problem).seconds
    assert PLANNERS["every pipeline"].plan(problem).seconds == pipelines(seed) >= among_all * (1 - 1e-9)
    assert PLANNERS["Alpa"].plan(problem).seconds == pytest.approx(pipelines(seed), rel=1e-9)
    found = alpa.fastest_pipeline(problem, space)
    assert found.seconds == pytest.approx(problem.evaluate(found.plan), rel=1e-9)
    for name in ("MCMC (FlexFlow)", "learned placement", "Tofu"):
        pruned = Planner(soap, only(submesh), PLANNERS[name].search)
        assert pruned.plan(problem).seconds >= among_all * (1 - 1e-9), name


@pytest.mark.parametrize("seed", [1, 4])
def test_no_search_beats_the_exhaustive_one_on_any_blocks(seed):
    problem = random_problem(seed, 2)
    best = PLANNERS["exhaustive"].plan(problem)
    for name, planner in PLANNERS.items():
        found = planner.plan(problem)
        assert found.seconds >= best.seconds * (1 - 1e-9), name
        assert not found.trace or found.trace[-1][1] == found.seconds
    assert PLANNERS["MCMC (FlexFlow)"].plan(problem).seconds == pytest.approx(best.seconds)


@pytest.mark.parametrize("seed", range(4))
def test_alpa_reaches_the_exhaustive_one_under_a_memory_limit(seed):
    for memory in (16_000, 8_000, 3_000):
        problem, want = random_problem(seed, memory=memory), pipelines(seed, memory=memory)
        found = PLANNERS["Alpa"].plan(problem)
        assert found.seconds == want == inf or found.seconds == pytest.approx(want, rel=1e-9)
        assert found.plan is None or max(problem.memory(found.plan)) <= memory
    assert want == inf


@pytest.mark.parametrize("seed", range(12))
def test_the_integer_program_equals_brute_force(seed):
    costs, changes, memory = random_strategies(seed, 2 + seed % 5)
    assert alpa.intra_operator(costs, changes)[0] == brute_force(costs, changes)
    limit = sum(map(max, memory)) // 2
    assert alpa.intra_operator(costs, changes, memory, limit)[0] == brute_force(costs, changes, memory, limit)


def test_a_strategy_that_cannot_be_is_not_chosen():
    assert alpa.intra_operator([[inf, 3], [1, 1]], {(0, 1): [[0, 0], [inf, 2]]}) == (6, [1, 1])
    assert alpa.intra_operator([[1]], {}, [[2]], 1) == (inf, [])


def test_early_pruning_tries_fewer_and_loses_nothing():
    problem = random_problem(2, 4)
    found = alpa.fastest_pipeline(problem, only(submesh)(problem, soap(problem)))
    assert found.tried < found.priced and found.seconds == pytest.approx(pipelines(2, 4), rel=1e-9)
    coarse = alpa.fastest_pipeline(problem, only(submesh)(problem, soap(problem)), gap=50)
    assert coarse.tried <= found.tried
    assert found.seconds <= coarse.seconds <= found.seconds + problem.micros * 50


@pytest.mark.parametrize("seed", range(8))
def test_clusters_equal_brute_force(seed):
    draw = random.Random(seed)
    flops = [draw.randint(1, 9) for _ in range(7)]
    outputs = [draw.randint(1, 4) for _ in range(7)]
    most = max(1.5 * sum(flops) / 3, *flops)
    sums = lambda cut: [sum(flops[a:b]) for a, b in pairwise(cut)]
    fits = [cut for cut in every_cut(7, 3) if max(sums(cut)) <= most]
    value = lambda cut: (max(outputs[a - 1] for a in cut[1:-1]), sum(s * s for s in sums(cut)))
    assert value(alpa.cluster_bounds(flops, outputs, 3)) == min(map(value, fits))


@pytest.mark.parametrize(
    "operators, devices, node, cuts", [(3, 4, 2, 2), (2, 4, 4, 3), (4, 2, 2, 2), (3, 3, 3, 1)]
)
def test_plans_are_counted_as_enumeration_counts_them(operators, devices, node, cuts):
    problem = random_problem(0, operators, devices, cuts=["sample", "parameter", "whole"][:cuts])
    network = replace(problem.cluster.network, node=node)
    problem = replace(problem, cluster=replace(problem.cluster, network=network))
    every = all_pipelines(problem)
    assert len(every) == len(set(every)) == alpa.count_pipelines(operators, devices, node, cuts)


def test_prices_by_hand():
    """Two operators on two nodes of two devices: 40 bytes a second inside a node, 10 between nodes."""
    cluster = Cluster(4, Device(10), Network(Link(0, 10), Link(0, 40), 2))
    operators = tuple(CutOperator(str(n), 120, 80, 160, 16, (80,), (), 4) for n in range(2))
    problem, on = ChainProblem(operators, cluster, 4, 6, 8, 2, 8), lambda first: Assignment(first, 1)
    # 36 s of work halved; 160 bytes of gradients summed for two micro-batches, or 80 bytes each time
    assert [problem.work(0, Assignment(0, 2, ("whole", cut))) for cut in ("sample", "parameter")] == [20, 20]
    # from cut rows to whole ones: half of 4 x 6 x 8 numbers of 8 bytes gathered; the way back is a slice
    rows, tokens = ("whole", "sample"), ("whole", "attribute")
    assert problem.change(rows, ("whole", "whole"), (0, 2)) == 768 / 40
    assert problem.change(rows, tokens, (0, 2)) == 2 * 384 / 40
    # 80 bytes there and back, inside a node or between two
    assert [problem.job(1, on(0), on(first)) for first in (1, 2)] == [36 + 4, 36 + 16]
    # four times 160 bytes of state; 16 bytes kept of two micro-batches on the first of two stages
    assert problem.memory((on(0), on(1))) == [640 + 32, 640 + 16, 0, 0]


def test_metropolis_takes_the_better_and_sometimes_the_worse():
    assert accepts(-1, 1, 0.99) and accepts(0, 1, 0.99)
    assert accepts(1, 1, 0.36) and not accepts(1, 1, 0.37)  # exp(-1) = 0.3679
    assert accepts(2, 4, 0.60) and not accepts(2, 4, 0.61)


def test_mcmc_is_never_worse_than_its_start_and_times_fewer_jobs_than_full_simulation():
    problem = random_problem(3, 6)
    found = Planner(soap, everything, mcmc(300, seed=2)).plan(problem)
    first, *_, last = [seconds for _, seconds in found.trace]
    assert found.seconds == last <= first and found.evaluations == 300
    assert found.jobs < 300 * len(problem) * problem.micros


@pytest.mark.parametrize("memory", [inf, 700.0])
def test_placements_alone_are_stuck_where_the_optimum_cuts_operators(memory):
    """With one micro-batch nothing of a chain runs at the same time, unless operators are cut."""
    chosen = replace(random_problem(5, 3, cuts=["sample", "whole"]), micros=1)
    small = tuple(replace(op, output=8, weights=8) for op in chosen.operators)
    device = replace(chosen.cluster.device, memory=memory)
    problem = replace(chosen, operators=small, cluster=replace(chosen.cluster, device=device))
    placed = Planner(soap, only(one_device), exhaustive()).plan(problem).seconds
    learned = PLANNERS["learned placement"].plan(problem)
    assert (
        learned.seconds == placed >= sum(problem.work(n, soap(problem)[n][0]) for n in range(3)) * (1 - 1e-9)
    )
    assert all(at.count == 1 for at in learned.plan)
    assert PLANNERS["Alpa"].plan(problem).seconds < 0.5 * placed


def test_tofu_cuts_the_first_axis_as_brute_force_does():
    problem = random_problem(7, 3, 2, cuts=["sample", "attribute", "parameter", "whole"])
    rows = [[a for a in row if a.count == 2] for row in soap(problem)]
    best = min(map(problem.evaluate, itertools.product(*rows)))
    assert PLANNERS["Tofu"].plan(problem).seconds == pytest.approx(best)
