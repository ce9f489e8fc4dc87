"""Bugs in the planners: each is noticed by the comparison with brute force, or with a closed form."""

from fractions import Fraction

import pytest
from planting import planted
from search_cases import one_device_each, ring_all_reduce
from test_planner import (
    every_piper_plan,
    every_staging,
    pair_of_messages,
    random_chain,
    random_cluster,
    random_graph,
)

from gpt2lab.machine.links import Link, Network
from gpt2lab.planner import balance, events, graph_stages, placement, problem, reinforce
from gpt2lab.planner.placement import Placing
from gpt2lab.planner.problem import Cluster, Device, Operator, OperatorGraph

pytestmark = pytest.mark.mutant


def ring_is_wrong():
    link = Link(Fraction(1, 3), Fraction(7))
    found = ring_all_reduce(range(4), Fraction(100), Cluster(4, Device(1), Network(link)))
    return found.makespan != link.time(6 * Fraction(25), 6)


def sharing_is_wrong():
    network = Network(Link(0, 4), Link(0, 12), 2)
    found = [pair_of_messages(Cluster(4, Device(1), network, uplinks=n), (2, 3)) for n in (0, 1)]
    return found != [[4, 4], [7, 7]]


def overlap():
    jobs = [events.Job("a", 0, 5), events.Job("b", 0, 1, ((2, 0),)), events.Job("c", 1, 1)]
    return events.simulate_jobs(jobs, Cluster(2, Device(1))).makespan != 6


def search_is_wrong():
    for seed in range(3, 9):
        p = Placing(random_graph(seed, 6), random_cluster(seed, 3), backward=seed % 2 == 0)
        found, best = placement.branch_and_bound(p).seconds, placement.exhaustive_placement(p).seconds
        if abs(found - best) > 1e-9 * best:
            return True
    return False


def memory_is_exceeded():
    ops = tuple(Operator(str(i), 4, 0, 0, 3) for i in range(4))
    p = Placing(OperatorGraph(ops, ()), Cluster(2, Device(1, 6), Network(Link(50, 1))))
    return max(p.held(placement.list_schedule(p).where)) > 6


def penalty_is_missing():
    ops = tuple(Operator(str(i), 4, 0, 0, 3) for i in range(4))
    p = Placing(OperatorGraph(ops, ()), Cluster(2, Device(1, 6), Network(Link(50, 1))))
    return p.cost((0, 0, 0, 0)) <= p.simulate((0, 0, 0, 0)).makespan


def learning_fails():
    p = Placing(random_graph(3, 8), Cluster(3, Device(1), Network(Link(1, 4))))
    found = reinforce.reinforce(p, seed=1, rounds=40)
    return not found.means[-1] < found.means[0]


def cut_is_wrong():
    for seed in range(6):
        times = random_chain(seed, 7).forward
        best = min(balance.slowest(times, cut) for cut in balance.every_cut(7, 3))
        if balance.slowest(times, balance.best_cut(times, 3)) != best:
            return True
    return False


def pipedream_is_wrong():
    return balance.pipedream(balance.Chain((4,), (8,), (0,), (), 1), 3)[0] != 4


def dapple_is_wrong():
    for chain in (random_chain(seed, 4) for seed in (6, 7, 46)):
        best = min(balance.dapple_latency(chain, plan, 2) for plan in balance.every_replicated(4, 3))
        if abs(balance.dapple(chain, 3, 2)[0] - best) > 1e-9 * best:
            return True
    return False


def stages_are_wrong():
    for seed in range(4):
        graph = random_graph(seed, 5)
        times = [op.flops for op in graph.operators]
        seconds = lambda s, times=times, graph=graph: (
            sum(times[v] for v in s) + 0.5 * graph_stages.crossing_bytes(graph, s)
        )
        best = min(max(map(seconds, plan)) for plan in every_staging(graph, 2))
        options = one_device_each(seconds, [0] * 5, 1)
        if abs(graph_stages.piper(graph, 2, options)[0] - best) > 1e-6:
            return True
        if abs(graph_stages.stages_by_ilp(graph, times, 2, 0.5)[0] - best) > 1e-6:
            return True
    return False


def piper_is_wrong():
    graph = OperatorGraph.chain([Operator(str(i), 4, 1, 1, 40) for i in range(4)])
    given = graph, Cluster(2, Device(1, 110), Network(Link(5, 10))), 1
    best = min(max(p.seconds for p in plan) for plan in every_piper_plan(graph, 2, RIGHT_OPTIONS(*given)))
    return graph_stages.piper(graph, 2, graph_stages.stage_options(*given))[0] != best


RIGHT_OPTIONS = graph_stages.stage_options


def wrong_speed(right):
    return lambda self, flow: flow.speed


def without_latency(right):
    def flow(self, work, speed, shared, then):
        right(
            self,
            work if shared or speed != 1 or then.__name__ == "<lambda>" and work > 1 else 0,
            speed,
            shared,
            then,
        )

    return flow


def busy_forgotten(right):
    def start(self, device):
        self.busy.discard(device)
        right(self, device)

    return start


def all_reduce_half(right):
    return lambda self, first, last, m: right(self, first, last, m) / 2


def one_way(right):
    return lambda graph, stage: sum(
        graph.operators[u].output for u, v in graph.edges if v in stage and u not in stage
    )


def shorter_tail(wrong):
    """Branch and bound that believes in another remaining path than there is."""

    def make(right):
        def init(self, *args, **options):
            right(self, *args, **options)
            self.tail = [wrong * t for t in self.tail]

        return init

    return make


def only_first_child(right):
    return lambda self, n, *rest: list(right(self, n, *rest))[:1]


def in_order_of_devices(right):
    """Pruning that takes the first choice for the best one."""

    def choices(self, n, *rest):
        for bound, d, begin, way in right(self, n, *rest):
            yield bound + 3 * d, d, begin, way

    return choices


BUGS = {
    "messages share nothing": (events._Clock, "_speed", wrong_speed, sharing_is_wrong),
    "latency is free": (events._Clock, "_flow", without_latency, ring_is_wrong),
    "a device does two things at a time": (events._Clock, "_start", busy_forgotten, overlap),
    "the bound is too large": (Placing, "__init__", shorter_tail(1.6), search_is_wrong),
    "only the most promising device is tried": (
        placement._Search,
        "_choices",
        only_first_child,
        search_is_wrong,
    ),
    "later devices are pruned too early": (
        placement._Search,
        "_choices",
        in_order_of_devices,
        search_is_wrong,
    ),
    "memory is not looked at": (placement, "STATE", lambda right: 0, None),
    "too much memory costs nothing": (
        Placing,
        "held",
        lambda right: lambda self, where: [0, 0],
        penalty_is_missing,
    ),
    "learning goes the wrong way": (
        reinforce,
        "_softmax",
        lambda right: lambda logits: right(-logits),
        learning_fails,
    ),
    "the cut begins a layer late": (
        balance,
        "best_cut",
        lambda right: (
            lambda times, s: (0, *(min(b + 1, len(times) - 1) for b in right(times, s)[1:-1]), len(times))
        ),
        cut_is_wrong,
    ),
    "the cut has equal counts": (
        balance,
        "best_cut",
        lambda right: lambda times, s: balance.equal_count(len(times), s),
        cut_is_wrong,
    ),
    "gradients travel once, not twice": (balance.Chain, "all_reduce", all_reduce_half, None),
    "PipeDream forgets the border": (balance.Chain, "hop", lambda right: lambda self, i: 0, None),
    "PipeDream never replicates": (
        balance,
        "pipedream_stage",
        lambda right: lambda chain, i, j, m: right(chain, i, j, m) if m == 1 else float("inf"),
        pipedream_is_wrong,
    ),
    "DAPPLE keeps one plan where several may win": (
        balance,
        "_unbeaten",
        lambda right: lambda plans: sorted(plans, key=lambda p: p[0])[:1],
        dapple_is_wrong,
    ),
    "DAPPLE keeps the worst plans": (
        balance,
        "_unbeaten",
        lambda right: lambda plans: [max(plans, key=lambda p: p[0])] if plans else [],
        dapple_is_wrong,
    ),
    "results that leave a stage are free": (graph_stages, "crossing_bytes", one_way, None),
    "down-sets are only prefixes": (
        graph_stages,
        "down_sets",
        lambda right: lambda graph: [frozenset(range(n)) for n in range(len(graph) + 1)],
        stages_are_wrong,
    ),
    "Piper forgets the micro-batches in flight": (
        graph_stages,
        "stage_options",
        lambda right: lambda *given: lambda stage, behind: right(*given)(stage, 0),
        piper_is_wrong,
    ),
    "Piper never recomputes": (
        graph_stages,
        "stage_options",
        lambda right: lambda *given: right(*given, recompute=(False,)),
        piper_is_wrong,
    ),
    "a down-set may miss what it needs": (
        graph_stages,
        "down_sets",
        lambda right: lambda graph: right(OperatorGraph(graph.operators, ())),
        stages_are_wrong,
    ),
}


def sees(name):
    """The check of a bug; some are seen against numbers by hand."""
    return (
        BUGS[name][3]
        or {
            "memory is not looked at": weights_are_free,
            "gradients travel once, not twice": sum_of_gradients_is_wrong,
            "PipeDream forgets the border": border_is_free,
            "results that leave a stage are free": leaving_is_free,
        }[name]
    )


def weights_are_free():
    ops = tuple(Operator(str(i), 4, 0, 1) for i in range(4))
    return Placing(OperatorGraph(ops, ()), Cluster(2, Device(1))).held((0, 0, 0, 1)) != [12, 4]


CHAIN = balance.Chain((2, 2), (4, 4), (12, 12), (18,), 1)


def sum_of_gradients_is_wrong():
    return balance.pipedream_stage(CHAIN, 0, 2, 3) != 32  # 2 (m - 1) / m of 24 bytes


def border_is_free():
    return balance.pipedream_cost(CHAIN, [balance.ChainStage(0, 1), balance.ChainStage(1, 2)]) != 36


def leaving_is_free():
    graph = OperatorGraph.chain([Operator(str(i), 1, 5) for i in range(3)])
    return graph_stages.crossing_bytes(graph, frozenset({1})) != 10


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_noticed(name):
    check = sees(name)
    assert not check(), "the check must pass without the bug"
    with planted(*BUGS[name][:3]):
        assert check()


def test_the_launch_time_is_part_of_an_operator():
    with planted(problem.Device, "time", lambda right: lambda self, flops: flops / self.rate):
        assert Device(1e9, launch=1e-3).time(1e6) != pytest.approx(2e-3)
