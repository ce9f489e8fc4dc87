"""Planners against brute force: clocks against closed forms, placements, cuts, integer programs, searches."""

import itertools
import random
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from math import inf
from unittest.mock import patch

import pytest
from search_cases import (
    brute_force,
    one_device_each,
    pipelines,
    random_problem,
    random_strategies,
    ring_all_reduce,
)

from gpt2lab.machine.links import Link, Network, all_reduce_time
from gpt2lab.model import PRESETS, GPT2Config
from gpt2lab.planner import alpa, balance, graph_stages, placement, search
from gpt2lab.planner.balance import Chain, best_cut, every_cut, every_replicated, slowest
from gpt2lab.planner.cuts import Assignment, ChainProblem, Clock, CutOperator, gpt2_cuts, merged
from gpt2lab.planner.events import Job, pipeline_jobs, simulate_jobs
from gpt2lab.planner.graph_stages import piper, stage_options, stages_by_ilp
from gpt2lab.planner.placement import Placing, branch_and_bound, exhaustive_placement, list_schedule
from gpt2lab.planner.problem import (
    CLUSTERS,
    Cluster,
    Device,
    Operator,
    OperatorGraph,
    find_cluster,
    gpt2_block,
    gpt2_layers,
)
from gpt2lab.planner.reinforce import reinforce
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
from gpt2lab.planner.tensor_costs import Shape, kept_bytes
from gpt2lab.schedules import Cost, registry, simulate
from gpt2lab.sharding.gpt2 import captured_gpt2
from gpt2lab.sharding.tofu import LinkChain


def random_graph(seed: int, count: int, memory: bool = False) -> OperatorGraph:
    draw = random.Random(seed)
    nodes = [
        Operator(f"op {i}", draw.randint(1, 9), draw.randint(0, 4), kept=draw.randint(0, 6) if memory else 0)
        for i in range(count)
    ]
    edges = [(u, v) for v in range(count) for u in range(v) if draw.random() < 0.35]
    return OperatorGraph(tuple(nodes), tuple(edges))


def random_cluster(seed: int, devices: int) -> Cluster:
    draw = random.Random(seed)
    node = draw.choice((1, 2))
    links = Link(draw.randint(0, 2), draw.choice((1, 4))), Link(0, draw.choice((2, 8)))
    return Cluster(devices, Device(1), Network(*links, node), draw.choice((0, 1)))


def random_chain(seed: int, layers: int) -> Chain:
    draw = random.Random(seed)
    numbers = lambda high, count=layers: tuple(draw.randint(0, high) for _ in range(count))
    return Chain(numbers(9), numbers(9), numbers(30), numbers(20, layers - 1), draw.choice((1, 4, 100)))


# --- the clock


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_a_ring_of_messages_takes_the_alpha_beta_time(n):
    link = Link(Fraction(1, 3), Fraction(7))
    found = ring_all_reduce(range(n), Fraction(100), Cluster(n, Device(1), Network(link)))
    assert found.makespan == link.time(2 * (n - 1) * Fraction(100, n), 2 * (n - 1))
    assert found.makespan == pytest.approx(all_reduce_time("ring", n, 100, link))
    assert sum(m.bytes for m in found.messages) == 2 * (n - 1) * 100
    assert len(found.messages) == 2 * n * (n - 1)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "breadth_first", "chimera"])
@pytest.mark.parametrize("p, m", [(2, 2), (2, 4), (4, 4), (4, 8)])
def test_pipelines_take_as_long_as_the_schedules_clock_says(name, p, m):
    """Of unequal stages, with latency; that clock is compared with the papers in `test_schedules`."""
    s = registry.make(name, p, m)
    forward, backward = [2 + n for n in range(s.depth)], [5 + 2 * n for n in range(s.depth)]
    for hop in (0, 1):
        cluster = Cluster(p, Device(1), Network(Link(hop, float("inf"))))
        found = simulate_jobs(pipeline_jobs(s, forward, backward), cluster).makespan
        assert found == simulate(s, Cost(forward, backward=backward, hop=hop)).makespan


@pytest.mark.parametrize("seed", range(30))
def test_devices_do_one_thing_at_a_time_and_nothing_runs_before_its_needs(seed):
    graph, cluster = random_graph(seed, 12), random_cluster(seed, 3)
    draw = random.Random(seed)
    problem = Placing(graph, cluster)
    found = problem.simulate([draw.randrange(3) for _ in range(12)])
    for device in range(3):
        spans = [s for job, s in zip(found.jobs, found.spans, strict=True) if job.device == device]
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(spans)))
    arrived = {(m.job, m.target): m for m in found.messages}
    assert len(arrived) == len(found.messages), "a result is sent to a device once"
    for job, (start, end) in zip(found.jobs, found.spans, strict=True):
        assert end - start >= job.seconds * (1 - 1e-12)
        for need, _ in job.needs:
            local = found.jobs[need].device == job.device
            assert start >= (found.spans[need][1] if local else arrived[need, job.device].end)
    for m in found.messages:
        link = cluster.network.link(m.source, m.target)
        assert m.end - m.start >= link.time(m.bytes) * (1 - 1e-12)
    assert found.makespan >= problem.lower_bound() * (1 - 1e-12)


def pair_of_messages(cluster, targets):
    jobs = [Job("a", 0, 1), Job("b", 1, 1)]
    jobs += [Job(f"to {t}", t, 0, ((i, 12),)) for i, t in enumerate(targets)]
    return [float(m.end) for m in simulate_jobs(jobs, cluster).messages]


def test_messages_share_a_devices_port():
    network = Network(Link(0, 4), Link(0, 12), 2)
    assert pair_of_messages(Cluster(4, Device(1), network), (2, 3)) == [4, 4]
    assert pair_of_messages(Cluster(4, Device(1), network), (2, 2)) == [7, 7], "one port"


def test_devices_of_a_node_share_its_cores():
    jobs = [Job(str(i), i, 3) for i in range(4)]
    assert simulate_jobs(jobs, Cluster(4, Device(1))).makespan == 3
    assert simulate_jobs(jobs, Cluster(4, Device(1), Network(Link(0, 1), node=4), cores=2)).makespan == 6
    assert simulate_jobs(jobs, find_cluster("laptop")).makespan == 6, "four ranks on two cores"


# --- the problem


def test_the_layers_of_gpt2_have_its_parameters_and_operations():
    config = PRESETS["gpt2"]
    graph = gpt2_layers(config, 2, 128)
    assert sum(op.weights for op in graph.operators) == 4 * config.parameters
    block = gpt2_block(config, 2, 128)
    matrices = [op for op in block.operators if op.weights > 4 * 2 * config.n_embd]
    assert sum(op.weights for op in block.operators) == graph.operators[1].weights
    products = sum(op.flops for op in matrices) + next(
        op.flops for op in block.operators if op.name == "core"
    )
    assert products == graph.operators[1].flops
    assert graph.operators[1].kept == kept_bytes(Shape(2, 128, config.n_embd, config.n_head, 1))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("parallel", [False, True])
def test_groups_of_heads_change_neither_work_nor_weights(groups, parallel):
    one, cut = (gpt2_block(PRESETS["nano"], 2, 32, g, parallel) for g in (1, groups))
    for what in ("flops", "output", "weights"):
        assert sum(getattr(op, what) for op in one.operators) == sum(
            getattr(op, what) for op in cut.operators
        )


def test_every_cluster_says_where_its_numbers_come_from():
    assert all(cluster.source for cluster in CLUSTERS.values())


def test_small_products_run_below_the_rate():
    device = Device(rate=1e9, launch=1e-3)
    assert device.time(1e6) == pytest.approx(2e-3) and device.time(1e9) == pytest.approx(1.001)


# --- placement


@pytest.mark.rotates
@pytest.mark.parametrize("seed", range(12))
def test_branch_and_bound_finds_what_brute_force_finds(seed):
    count, devices = (10, 2) if seed < 2 else (6, 3)
    problem = Placing(random_graph(seed, count), random_cluster(seed, devices))
    best, found = exhaustive_placement(problem), branch_and_bound(problem)
    assert found.seconds == pytest.approx(best.seconds, rel=1e-12) and found.timed <= best.timed
    greedy = list_schedule(problem)
    assert greedy.seconds >= best.seconds * (1 - 1e-12)
    assert problem.critical_path()[0] == pytest.approx(longest_by_enumeration(problem))


@pytest.mark.parametrize("seed", [0, 5, 23])
def test_devices_without_work_are_alike_only_in_one_node(seed):
    """Nodes of two devices that share a core: the second device to get work may best be the third."""
    problem = Placing(random_graph(seed, 5), random_cluster(seed, 4))
    assert problem.cluster.network.node == 2
    best, found = exhaustive_placement(problem), branch_and_bound(problem)
    assert found.seconds == pytest.approx(best.seconds, rel=1e-12)


def longest_by_enumeration(problem):
    """The heaviest path, one path after the other."""

    def paths(n):
        yield from ([n, *rest] for v in problem.graph.after[n] for rest in paths(v))
        yield [n]

    times = problem.times
    return max(sum(times[n] for n in path) for start in range(len(times)) for path in paths(start))


@pytest.mark.parametrize("seed", range(8))
def test_no_search_exceeds_the_memory(seed):
    graph = random_graph(seed, 7, memory=True)
    limit = max(sum(op.kept for op in graph.operators) / 2 + 2, max(op.kept for op in graph.operators))
    problem = Placing(graph, Cluster(2, Device(1, memory=limit), Network(Link(1, 4))))
    best = exhaustive_placement(problem)
    with patch.object(placement, "PENALTY", 0):
        unpunished = reinforce(problem, rounds=20).best
    for found in (branch_and_bound(problem), unpunished):
        assert max(problem.held(found.where)) <= limit
    assert branch_and_bound(problem).seconds == pytest.approx(best.seconds)
    together = (0,) * len(graph)
    if not problem.fits(together):
        assert problem.cost(together) > problem.simulate(together).makespan


def test_learning_reaches_greedy_and_never_beats_the_optimum():
    config = GPT2Config(n_positions=128, n_layer=4, n_head=8, n_embd=256)
    graph = gpt2_block(config, 8, 128)
    cluster = Cluster(3, Device(50e9, launch=20e-6), Network(Link(50e-6, 8e8)))
    problem = Placing(graph, cluster)
    best, learned = branch_and_bound(problem), reinforce(problem, seed=1, rounds=60)
    assert len(graph) == 12 and min(learned.bests) == learned.best.seconds
    assert best.seconds * (1 - 1e-12) <= learned.best.seconds <= list_schedule(problem).seconds * (1 + 1e-12)
    assert learned.means[-1] < learned.means[0]
    assert learned == reinforce(problem, seed=1, rounds=60), "the seed decides everything"


# --- balance


@pytest.mark.parametrize("layers", range(1, 11))
def test_the_cut_of_a_chain_is_the_best_of_all(layers):
    for seed in range(5):
        times = random_chain(100 * layers + seed, layers).forward
        for stages in range(1, layers + 1):
            best = min(slowest(times, cut) for cut in every_cut(layers, stages))
            assert slowest(times, best_cut(times, stages)) == best
            assert best <= slowest(times, balance.equal_count(layers, stages))


@pytest.mark.parametrize("layers", range(1, 11))
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_pipedream_and_dapple_are_as_good_as_exhaustive_search(layers, devices):
    for seed in range(2):
        chain = random_chain(10 * layers + seed, layers)
        every = list(every_replicated(layers, devices))
        value, stages = balance.pipedream(chain, devices)
        assert value == balance.pipedream_cost(chain, stages)
        assert value == min(balance.pipedream_cost(chain, plan) for plan in every)
        value, stages = balance.dapple(chain, devices, micros=3)
        assert value == pytest.approx(balance.dapple_latency(chain, stages, 3), rel=1e-12)
        best = min(balance.dapple_latency(chain, plan, 3) for plan in every)
        assert value == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("p, m", [(1, 3), (2, 4), (4, 8)])
def test_dapples_latency_is_1f1bs_where_stages_are_equal_and_never_more(p, m):
    even = Chain((2,) * p, (4,) * p, (0,) * p, (0,) * (p - 1), 1)
    stages = [balance.ChainStage(i, i + 1) for i in range(p)]
    assert balance.dapple_latency(even, stages, m) == (m + p - 1) * 6
    for seed in range(20):
        chain = random_chain(seed, p)
        chain = Chain(chain.forward, chain.backward, (0,) * p, (0,) * (p - 1), 1)
        jobs = pipeline_jobs(registry.make("1f1b", p, m), chain.forward, chain.backward)
        assert balance.dapple_latency(chain, stages, m) <= simulate_jobs(jobs, Cluster(p, Device(1))).makespan


@pytest.mark.parametrize("layers", range(1, 11))
def test_the_integer_program_finds_the_best_cut_of_a_chain(layers):
    times = random_chain(layers, layers).forward
    stages = min(3, layers)
    graph = OperatorGraph.chain([Operator(str(i), t, 0) for i, t in enumerate(times)])
    found, members = stages_by_ilp(graph, times, stages)
    assert found == pytest.approx(slowest(times, best_cut(times, stages)))
    assert sorted(v for stage in members for v in stage) == list(range(layers))


def every_staging(graph, stages):
    """All ways to give operators to stages so that no edge leads back."""
    for where in product(range(stages), repeat=len(graph)):
        if all(where[u] <= where[v] for u, v in graph.edges):
            yield [frozenset(v for v, s in enumerate(where) if s == t) for t in range(stages)]


@pytest.mark.parametrize("seed", range(8))
def test_integer_program_and_piper_find_the_best_stages_of_a_graph(seed):
    graph, stages, per_byte = random_graph(seed, 6, memory=True), 2 + seed % 2, Fraction(seed % 3, 2)
    times, sizes = [op.flops for op in graph.operators], [op.kept for op in graph.operators]
    limit = max(sizes) + sum(sizes) / 2
    seconds = lambda s: sum(times[v] for v in s) + float(per_byte) * graph_stages.crossing_bytes(graph, s)
    fits = lambda plan: all(sum(sizes[v] for v in s) <= limit for s in plan)
    best = min(max(map(seconds, plan)) for plan in every_staging(graph, stages) if fits(plan))
    found, _ = stages_by_ilp(graph, times, stages, float(per_byte), (sizes, limit))
    assert found == pytest.approx(best)
    value, plan = piper(graph, stages, one_device_each(seconds, sizes, limit))
    assert value == pytest.approx(best) and max(p.seconds for p in plan) == value


def every_piper_plan(graph, devices, options):
    """Exhaustive: all pipelines of down-sets with all options of every stage."""

    def rest(done, left, more):
        if not more:
            if len(done) == len(graph):
                yield ()
            return
        for larger in graph_stages.down_sets(graph):
            for used, plan in options(larger - done, more - 1) if larger > done else ():
                if used <= left:
                    yield from ((plan, *others) for others in rest(larger, left - used, more - 1))

    for count in range(1, min(devices, len(graph)) + 1):
        yield from rest(frozenset(), devices, count)


@pytest.mark.rotates
@pytest.mark.parametrize("layers", range(1, 11))
@pytest.mark.parametrize("memory", [60, 1e9])
def test_piper_is_as_good_as_exhaustive_search_on_chains(layers, memory):
    draw = random.Random(layers)
    nodes = [
        Operator(str(i), draw.randint(1, 9), draw.randint(1, 3), draw.randint(0, 4), draw.randint(1, 9))
        for i in range(layers)
    ]
    graph, devices = OperatorGraph.chain(nodes), 3 if layers > 6 else 4
    options = stage_options(graph, Cluster(devices, Device(1, memory), Network(Link(0.1, 10))), rows=4)
    every = [max(p.seconds for p in plan) for plan in every_piper_plan(graph, devices, options)]
    if not every:
        with pytest.raises(ValueError, match=f"{layers} operators fit into {devices} devices"):
            piper(graph, devices, options)
    else:
        assert piper(graph, devices, options)[0] == min(every)


def test_memory_makes_piper_recompute_or_cut():
    nodes = [Operator(str(i), 4, 1, 1, 40) for i in range(4)]
    graph = OperatorGraph.chain(nodes)
    plans = {}
    for memory in (1e9, 110):
        options = stage_options(graph, Cluster(2, Device(1, memory), Network(Link(5, 10))), rows=1)
        plans[memory] = piper(graph, 2, options)
    assert plans[110][0] > plans[1e9][0] and any(p.recompute for p in plans[110][1])
    assert not any(p.recompute for p in plans[1e9][1])


# --- searches for cuts of a chain: none beats the exhaustive one, and those that are exact reach it


CONFIG = GPT2Config(vocab_size=37, n_positions=12, n_layer=1, n_head=4, n_embd=24)
KINDS = {"sample": ["batch"] * 4, "attribute": ["seq"] * 4, "parameter": ["vocab", "heads", "ff", "vocab"]}


@pytest.mark.rotates
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


@pytest.mark.rotates
@pytest.mark.parametrize("seed", [0, 3, 4, 7, 16])
def test_no_search_beats_the_exhaustive_one_and_alpa_reaches_it(seed):
    problem = random_problem(seed)
    space = only(submesh)(problem, soap(problem))
    among_all = Planner(soap, only(submesh), exhaustive()).plan(problem).seconds
    assert PLANNERS["every pipeline"].plan(problem).seconds == pipelines(seed) >= among_all * (1 - 1e-9)
    assert PLANNERS["Alpa"].plan(problem).seconds == pytest.approx(pipelines(seed), rel=1e-9)
    plan, seconds, _ = alpa.fastest_pipeline(problem, space)
    assert seconds == pytest.approx(problem.evaluate(plan), rel=1e-9)
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


@pytest.mark.rotates
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
    with patch.object(alpa, "_stages_below", wraps=alpa._stages_below) as tried:
        _, seconds, priced = alpa.fastest_pipeline(problem, only(submesh)(problem, soap(problem)))
    assert len({call.args[2] for call in tried.call_args_list}) < priced
    assert seconds == pytest.approx(pipelines(2, 4), rel=1e-9)


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
    # blocks that begin with the same device are two stages as well
    wide = Assignment(0, 2, ("whole", "whole"))
    assert problem.memory((on(0), wide)) == [640 + 32 + 640 + 16, 640 + 16, 0, 0]


def test_metropolis_takes_the_better_and_sometimes_the_worse():
    assert accepts(-1, 1, 0.99) and accepts(0, 1, 0.99)
    assert accepts(1, 1, 0.36) and not accepts(1, 1, 0.37)  # exp(-1) = 0.3679
    assert accepts(2, 4, 0.60) and not accepts(2, 4, 0.61)
    assert accepts(0, 0, 0.5) and not accepts(1, 0, 0.0)  # without heat only what is no worse


def test_mcmc_is_never_worse_than_its_start_and_times_fewer_jobs_than_full_simulation():
    problem = random_problem(3, 6)
    found = Planner(soap, everything, mcmc(300, seed=2)).plan(problem)
    first, *_, last = [seconds for _, seconds in found.trace]
    assert found.seconds == last <= first and found.evaluations == 300
    assert found.jobs < 300 * len(problem) * problem.micros


def test_mcmc_never_ends_with_a_plan_that_does_not_fit():
    """Without a limit its best plan for this problem holds 13,218 bytes."""
    problem = random_problem(3, 5, memory=10_000)
    found = Planner(soap, everything, mcmc(300, seed=2)).plan(problem)
    assert problem.evaluate(found.plan) == found.seconds < inf
    assert max(problem.memory(found.plan)) <= 10_000


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


STAGES = {"PipeDream": lambda chain, n, _: balance.pipedream(chain, n), "DAPPLE": balance.dapple}


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("seed, legal", [(1, True), (4, True), (7, True), (8, False)])
def test_replicated_stages_are_timed_as_their_planner_cut_them(name, seed, legal):
    """Three replicas are no block of devices: then there is a plan without seconds, which has been looked at."""
    problem = random_problem(seed)
    found = PLANNERS[name].plan(problem)
    _, stages = STAGES[name](search._chain_of(problem), problem.cluster.devices, problem.micros)
    assert found.evaluations == 1 and (found.plan is None) != legal
    if legal:
        of_each = [(stage, sum(s.replicas for s in stages[:n])) for n, stage in enumerate(stages)]
        want = [(first, s.replicas) for s, first in of_each for _ in range(s.first, s.last)]
        assert [(at.first, at.count) for at in found.plan] == want
        assert found.seconds == problem.evaluate(found.plan) < inf
        assert all(("sample" in at.cut) == (at.count > 1) for at in found.plan)


def test_tofu_cuts_the_first_axis_as_brute_force_does():
    problem = random_problem(7, 3, 2, cuts=["sample", "attribute", "parameter", "whole"])
    rows = [[a for a in row if a.count == 2] for row in soap(problem)]
    best = min(map(problem.evaluate, itertools.product(*rows)))
    assert PLANNERS["Tofu"].plan(problem).seconds == pytest.approx(best)
