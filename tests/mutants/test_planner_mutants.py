"""Bugs in the planners and searches: each is seen by brute force, by a full simulation, or by a number by hand."""

import pytest
import test_planner as planner
import test_sharding_stages as staged
from planting import bugs, is_killed

from gpt2lab.machine.links import Link, Network
from gpt2lab.planner import alpa, balance, cuts, events, graph_stages, placement, reinforce
from gpt2lab.planner.balance import Chain, ChainStage
from gpt2lab.planner.cuts import ChainProblem, Clock
from gpt2lab.planner.placement import Placing
from gpt2lab.planner.problem import Cluster, Device, Operator, OperatorGraph
from gpt2lab.planner.search import PLANNERS, accepts
from gpt2lab.sharding.crossing import Crossing

pytestmark = pytest.mark.mutant

RING = planner.test_a_ring_of_messages_takes_the_alpha_beta_time, 4
SHARED = planner.test_messages_share_a_devices_port
PLACED = planner.test_branch_and_bound_finds_what_brute_force_finds, 7
CUT = planner.test_the_cut_of_a_chain_is_the_best_of_all, 7
STAGES = planner.test_integer_program_and_piper_find_the_best_stages_of_a_graph, 1
PIPER = planner.test_memory_makes_piper_recompute_or_cut
PIPELINE = planner.test_no_search_beats_the_exhaustive_one_and_alpa_reaches_it
PROGRAM = planner.test_the_integer_program_equals_brute_force
METROPOLIS = planner.test_metropolis_takes_the_better_and_sometimes_the_worse
BY_HAND = planner.test_prices_by_hand
BORDER = staged.test_every_place_receives_each_box_once_and_only_boxes_that_overlap_are_sent
SCATTERED = staged.test_scattering_sends_each_number_once_over_the_border


def one_at_a_time():
    """A device is at work when what its next job needs arrives."""
    jobs = [events.Job("a", 0, 5), events.Job("b", 0, 1, ((2, 0),)), events.Job("c", 1, 1)]
    assert events.simulate_jobs(jobs, Cluster(2, Device(1))).makespan == 6


def memory():
    """Four times 4 bytes of weights; and one device for all takes less time, but not a lower cost."""
    where, network = (0, 0, 0, 1), Network(Link(50, 1))
    graph = lambda *sizes: OperatorGraph(tuple(Operator(str(i), 4, 0, *sizes) for i in range(4)), ())
    assert Placing(graph(1), Cluster(2, Device(1))).held(where) == [12, 4]
    small = Placing(graph(0, 3), Cluster(2, Device(1, 6), network))
    assert small.cost((0, 0, 0, 0)) > small.simulate((0, 0, 0, 0)).makespan


def chains():
    """PipeDream: 2 (m - 1) / m of 24 bytes are summed, a border is crossed twice; one layer on three devices."""
    chain = Chain((2, 2), (4, 4), (12, 12), (18,), 1)
    assert balance.pipedream_stage(chain, 0, 2, 3) == 32
    assert balance.pipedream_cost(chain, [ChainStage(0, 1), ChainStage(1, 2)]) == 36
    assert balance.pipedream(Chain((4,), (8,), (0,), (), 1), 3)[0] == 4


def borders():
    """Of the middle one of three operators in a row; what each needs comes before it."""
    graph = OperatorGraph.chain([Operator(str(i), 1, 5) for i in range(3)])
    assert graph_stages.crossing_bytes(graph, frozenset({1})) == 10
    assert graph_stages.down_sets(graph) == [frozenset(range(n)) for n in range(4)]


def dapple():
    for chain in (planner.random_chain(seed, 4) for seed in (6, 7, 46)):
        best = min(balance.dapple_latency(chain, plan, 2) for plan in balance.every_replicated(4, 3))
        assert balance.dapple(chain, 3, 2)[0] == pytest.approx(best, rel=1e-9)


BUGS = {
    "messages share nothing":
        (events._Clock._speed, "capacity / self.users[what]", "capacity", SHARED),
    "latency is free": (events._Clock._send, "link.latency, 1", "0, 1", RING),
    "a device does two things at a time":
        (events._Clock._start, "self.busy.add(device)", "pass", one_at_a_time),
    "the bound is too large":
        (placement._Search._choices, "begin + problem.tail[n]", "begin + 1.6 * problem.tail[n]", PLACED),
    "only the most promising device is tried":
        (placement._Search.extend, "done, free, held)):", "done, free, held))[:1]:", PLACED),
    "later devices are pruned too early":
        (placement._Search._choices, "yield max(", "yield 3 * d + max(", PLACED),
    "memory is not looked at": (Placing.__init__, "STATE * op.weights + ", "", memory),
    "too much memory costs nothing": (Placing.cost, "max(0.0, held - limit)", "0.0", memory),
    "learning goes the wrong way":
        (reinforce._softmax, "np.exp(logits - logits.max", "np.exp(-logits - (-logits).max",
         planner.test_learning_reaches_greedy_and_never_beats_the_optimum),
    "the cut begins a layer late": (balance.best_cut, "total[j] - total[i]", "total[j] - total[i + 1]", CUT),
    "the cut has equal counts":
        (balance.best_cut, "total = [0", "return equal_count(len(times), stages)\n    total = [0", CUT),
    "gradients travel once, not twice": (Chain.all_reduce, "2 * (replicas", "(replicas", chains),
    "PipeDream forgets the border": (balance.pipedream_cost, "2 * chain.hop(s.last)", "0", chains),
    "PipeDream never replicates":
        (balance.pipedream_stage, "compute / replicas", "compute / (replicas == 1 or 1e-9)", chains),
    "DAPPLE keeps one plan where several may win":
        (balance._unbeaten, "return kept", "return kept[:1]", dapple),
    "DAPPLE keeps the worst plans":
        (balance._unbeaten, "return kept", "return sorted(plans, key=lambda plan: plan[0])[-1:]", dapple),
    "results that leave a stage are free":
        (graph_stages.crossing_bytes, " + sum(graph.operators[u].output for u in going)", "", borders),
    "down-sets are only prefixes":
        (graph_stages.down_sets, "s | {n} for s in found if s.issuperset(graph.before[n])",
         "frozenset(range(n + 1)) for s in found", STAGES),
    "a down-set may miss what it needs":
        (graph_stages.down_sets, " if s.issuperset(graph.before[n])", "", borders),
    "Piper forgets the micro-batches in flight": (graph_stages.stage_options, "(behind + 1) *", "1 *", PIPER),
    "Piper never recomputes":
        (graph_stages.stage_options, "for twice in (False, True)", "for twice in (False,)", PIPER),
    "a launch takes no time":
        (Device.time, "self.launch + ", "", planner.test_small_products_run_below_the_rate),
    "t_max does not limit the stages":
        (alpa._stages_below, "seconds > limit", "seconds > inf", (PIPELINE, 3)),
    "only one t_max is tried": (alpa.fastest_pipeline, "micros * limit >= best", "limit > min(every)", (PIPELINE, 3)),
    "whole nodes are no submeshes":
        (alpa.submeshes, "return inside + [", "return inside + 0 * [", (PIPELINE, 3)),
    "a submesh may begin inside another node":
        (cuts.block_mesh, "if first // node == (first + count - 1) // node:", "if True:", (PIPELINE, 3)),
    "the clock waits for the input only": (cuts._waits, "in at.devices", "in ()", (PIPELINE, 3)),
    "entering a stage is free": (ChainProblem.enter, "return link.time(2 * size, 2) +", "return", BY_HAND),
    "sums of gradients are free": (ChainProblem._sum, "if over else 0.0", "if False else 0.0", BY_HAND),
    "a gradient does not go back":
        (ChainProblem.change, " + _path_seconds(self, b, a, shape, mesh)", "", BY_HAND),
    "micro-batches in flight are forgotten":
        (ChainProblem.held, "min(self.micros, behind + 1)", "1", BY_HAND),
    "the integer program ignores changes of layout":
        (alpa.intra_operator, "target += [matrix[i][j]", "target += [0 * matrix[i][j]", (PROGRAM, 3)),
    "the integer program ignores memory": (alpa.intra_operator, "if limit < inf:", "if False:", (PROGRAM, 3)),
    "only the changed operator is timed again":
        (Clock.__init__, " or not moved.isdisjoint(needs)", "",
         (planner.test_delta_simulation_equals_full_simulation_and_times_fewer_jobs, 1)),
    "only worse plans are accepted":
        (accepts, "change <= 0 or scale > 0 and draw < exp(-change / scale)", "change > 0", METROPOLIS),
    "every plan is accepted": (accepts, "draw < exp(-change / scale)", "True", METROPOLIS),
    "MCMC changes only the first operator":
        (PLANNERS["MCMC (FlexFlow)"].search, "draw.randrange(len(problem))", "0",
         (planner.test_no_search_beats_the_exhaustive_one_on_any_blocks, 1)),
    "clusters have equal counts of bytes":
        (alpa.cluster_bounds, "outputs[i - 1] if i else 0", "0", (planner.test_clusters_equal_brute_force, 0)),
    "an operator has one cut for all axes":
        (alpa.count_pipelines, "cuts ** sum(", "cuts ** any(",
         (planner.test_plans_are_counted_as_enumeration_counts_them, 3, 4, 2, 2)),
    "boxes that overlap are not all sent":
        (Crossing.pieces, "if all(start < end", "if number == 0 and all(start < end", BORDER),
    "copies cross the border": (Crossing.arrival, "if lies.on(a) is None]", "if False]", SCATTERED),
}  # fmt: skip


@bugs(BUGS)
def test_a_bug_is_noticed(bug, check):
    assert is_killed(bug, check), "nobody noticed"
