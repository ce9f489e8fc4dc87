"""Planners against brute force: clocks against closed forms, placements, cuts, integer programs."""

import random
from fractions import Fraction
from itertools import pairwise, product

import pytest
from search_cases import one_device_each, ring_all_reduce

from gpt2lab.machine.links import Link, Network, all_reduce_time
from gpt2lab.model import PRESETS, GPT2Config
from gpt2lab.planner import balance, graph_stages
from gpt2lab.planner.balance import Chain, best_cut, every_cut, every_replicated, slowest
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
from gpt2lab.planner.tensor_costs import Shape, kept_bytes
from gpt2lab.schedules import Cost, formulas, registry, simulate


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
    return Cluster(devices, Device(1), Network(*links, node), draw.choice((0, 1)), draw.choice((0, 1)))


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
    assert sum(m.bytes for m in found.messages) == 2 * (n - 1) * 100 and len(found.messages) == 2 * n * (
        n - 1
    )


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "breadth_first", "chimera"])
@pytest.mark.parametrize("p, m", [(2, 2), (2, 4), (4, 4), (4, 8)])
def test_pipelines_take_the_papers_times(name, p, m):
    s = registry.make(name, p, m)
    share = Fraction(p, s.depth)
    jobs = pipeline_jobs(s, [share] * s.depth, [2 * share] * s.depth)
    expected = formulas.makespan(name, p, m, 1, 1, 1)
    found = simulate_jobs(jobs, Cluster(p, Device(1))).makespan
    assert expected in (None, found) and found == simulate(s, Cost(share, share, share)).makespan


def test_pipelines_with_latency_agree_with_the_schedules_clock():
    s = registry.make("1f1b", 3, 5)
    found = simulate_jobs(
        pipeline_jobs(s, [2, 3, 4], [5, 6, 7]), Cluster(3, Device(1), Network(Link(1, float("inf"))))
    )
    assert found.makespan == simulate(s, Cost([2, 3, 4], backward=[5, 6, 7], hop=1)).makespan


@pytest.mark.parametrize("seed", range(30))
def test_devices_do_one_thing_at_a_time_and_nothing_runs_before_its_needs(seed):
    graph, cluster = random_graph(seed, 12), random_cluster(seed, 3)
    draw = random.Random(seed)
    problem = Placing(graph, cluster, backward=seed % 2 == 0)
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


def test_messages_share_a_nodes_uplink_and_a_devices_port():
    network = Network(Link(0, 4), Link(0, 12), 2)
    assert pair_of_messages(Cluster(4, Device(1), network), (2, 3)) == [4, 4]
    assert pair_of_messages(Cluster(4, Device(1), network, uplinks=1), (2, 3)) == [7, 7]
    assert pair_of_messages(Cluster(4, Device(1), network, uplinks=2), (2, 3)) == [4, 4]
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


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("backward", [False, True])
def test_branch_and_bound_finds_what_brute_force_finds(seed, backward):
    count, devices = (10, 2) if seed < 2 else (6, 3)
    problem = Placing(random_graph(seed, count), random_cluster(seed, devices), backward)
    best, found = exhaustive_placement(problem), branch_and_bound(problem)
    assert found.seconds == pytest.approx(best.seconds, rel=1e-12) and found.timed <= best.timed
    greedy = list_schedule(problem)
    assert greedy.seconds >= best.seconds * (1 - 1e-12)
    assert problem.critical_path()[0] == pytest.approx(longest_by_enumeration(problem))


def longest_by_enumeration(problem):
    """The heaviest path, one path after the other."""

    def paths(n):
        yield from ([n, *rest] for v in problem.graph.after[n] for rest in paths(v))
        yield [n]

    weight = [a + b for a, b in zip(problem.times, problem.back, strict=True)]
    return max(sum(weight[n] for n in path) for start in range(len(weight)) for path in paths(start))


@pytest.mark.parametrize("seed", range(8))
def test_no_search_exceeds_the_memory(seed):
    graph = random_graph(seed, 7, memory=True)
    limit = max(sum(op.kept for op in graph.operators) / 2 + 2, max(op.kept for op in graph.operators))
    problem = Placing(graph, Cluster(2, Device(1, memory=limit), Network(Link(1, 4))))
    best = exhaustive_placement(problem)
    for found in (branch_and_bound(problem), reinforce(problem, rounds=20).best):
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
    value, plan = piper(graph, stages, one_device_each(seconds, sizes, limit), stages)
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
