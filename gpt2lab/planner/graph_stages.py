"""Cutting a graph into pipeline stages: an integer program (Tarnawski et al. 2020) and Piper's dynamic program (2021).

A down-set is a set of operators with all that they need. A pipeline is a growing row of down-sets; a stage is what one
adds to the one before. So an edge never leads back to an earlier stage, which is stricter than the contiguity of
Tarnawski et al., where two stages may need each other.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from ..machine.arguments import checked
from ..machine.patience import patiently
from .problem import STATE, Cluster, OperatorGraph


@dataclass(frozen=True)
class StagePlan:
    """The operators of a stage, and how it uses its devices: replicas, tensor-parallel parts, recomputing."""

    operators: tuple[int, ...]
    dp: int = 1
    tp: int = 1
    recompute: bool = False
    seconds: float = 0.0


@checked()
def crossing_bytes(graph: OperatorGraph, stage: frozenset[int]) -> float:
    """Bytes that come into a set of operators and leave it; a result counts once in each direction."""
    coming = {u for u, v in graph.edges if v in stage and u not in stage}
    going = {u for u, v in graph.edges if u in stage and v not in stage}
    return sum(graph.operators[u].output for u in coming) + sum(graph.operators[u].output for u in going)


@checked()
def down_sets(graph: OperatorGraph) -> list[frozenset[int]]:
    """All sets of operators that contain what their members need, the smaller ones first."""
    found = {frozenset()}
    for n in patiently(range(len(graph)), "operators"):
        found |= {s | {n} for s in found if s.issuperset(graph.before[n])}
    return sorted(found, key=lambda s: (len(s), sorted(s)))


@checked(rows=1)
def stage_options(graph: OperatorGraph, cluster: Cluster, rows: int) -> Callable:
    """What Piper may do with a stage: a function (operators, stages behind it) -> [(devices, StagePlan)].

    Seconds for one micro-batch of `rows` rows: forward and backward on dp x tp devices, recomputing adds a forward;
    messages across its borders in both directions; for tp an all-reduce of its largest result, twice an operator; for
    dp the sum of the gradients, shared out over `rows` micro-batches a step.
    Memory: state / tp, and what is kept of `stages behind + 1` micro-batches in flight, as in 1F1B.
    """
    device, link = cluster.device, cluster.network.between

    def options(stage: frozenset[int], behind: int) -> Iterable[tuple[int, StagePlan]]:
        members = [graph.operators[n] for n in stage]
        state, kept = STATE * sum(op.weights for op in members), sum(op.kept for op in members)
        largest = max(op.output for op in members)
        for used in range(1, cluster.devices + 1):
            for tp in (t for t in range(1, used + 1) if used % t == 0):
                dp = used // tp
                if dp > rows:
                    continue
                again = sum(device.time(op.flops / used) for op in members)
                compute = again + sum(device.time(2 * op.flops / used) for op in members)
                rest = link.time(2 * crossing_bytes(graph, stage) / used)
                if tp > 1:
                    size = 2 * (tp - 1) / tp * largest / dp
                    rest += 2 * len(members) * link.time(size, 2 * (tp - 1))
                if dp > 1:
                    rest += link.time(2 * (dp - 1) / dp * state / STATE / tp, 2 * (dp - 1)) / rows
                for twice in (False, True):
                    flying = (behind + 1) * (largest if twice else kept) + (kept if twice else 0)
                    if state / tp + flying / used <= device.memory:
                        seconds = compute + rest + (again if twice else 0)
                        yield used, StagePlan(tuple(sorted(stage)), dp, tp, twice, seconds)

    return options


@checked(devices=(1, 4096))
def piper(graph: OperatorGraph, devices: int, options: Callable) -> tuple[float, tuple[StagePlan, ...]]:
    """The pipeline whose slowest stage is fastest, on at most `devices` devices.

    Two levels: inside a stage the best of its `options`; outside best(done, devices, stages) = min over the next stage
    of max(its seconds, best(done + stage, ...)). Raises ValueError where nothing fits.
    """
    sets, everything = down_sets(graph), frozenset(range(len(graph)))

    @cache
    def inside(stage: frozenset[int], behind: int) -> dict[int, StagePlan]:
        """The fastest way to use each number of devices."""
        found: dict[int, StagePlan] = {}
        for used, plan in options(stage, behind):
            if used not in found or plan.seconds < found[used].seconds:
                found[used] = plan
        return found

    @cache
    def best(done: frozenset[int], left: int, more: int):
        """The rest of the pipeline in exactly `more` stages on at most `left` devices, or None."""
        if not more:
            return (0.0, ()) if done == everything else None
        found = None
        for larger in sets:
            if not larger > done:
                continue
            for used, plan in inside(larger - done, more - 1).items():
                if used > left or found and plan.seconds >= found[0]:
                    continue
                rest = best(larger, left - used, more - 1)
                if rest and (found is None or max(plan.seconds, rest[0]) < found[0]):
                    found = max(plan.seconds, rest[0]), (plan, *rest[1])
        return found

    counts = patiently(range(1, min(devices, len(graph)) + 1), "numbers of stages")
    found = [plan for count in counts if (plan := best(frozenset(), devices, count))]
    if not found:
        raise ValueError(
            f"No stages of these {len(graph)} operators fit into {devices} devices. Use more, or more memory."
        )
    return min(found, key=lambda plan: plan[0])


def integer_program(cost, whole, most, rows):
    """The least `cost` of numbers from 0 to `most`, the `whole` ones integers, by HiGHS.

    `rows` are ({place: factor}, least sum, most sum).
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    places, low, high = zip(*rows, strict=True)
    matrix = np.zeros((len(rows), len(cost)))
    for line, row in zip(matrix, places, strict=True):
        line[list(row)] = list(row.values())
    options, limits = {"mip_rel_gap": 0}, LinearConstraint(matrix, low, high)
    return milp(cost, integrality=whole, bounds=Bounds(0, most), constraints=limits, options=options)


@checked(times=0, stages=(1, 1000), per_byte=0)
def stages_by_ilp(
    graph: OperatorGraph,
    times: Sequence[float],
    stages: int,
    per_byte: float = 0.0,
    memory: tuple | None = None,
):
    """(seconds, operators of every stage) of the fastest slowest stage, by HiGHS; stages may stay empty.

    Variables: x[v, s], operator v is on stage s; in[u, s] and out[u, s], the result of u comes into or leaves stage s;
    and the time T. Minimise T so that every operator is on one stage; stages never fall along an edge;
    in[u, s] >= x[v, s] - x[u, s] and out[u, s] >= x[u, s] - x[v, s] for an edge (u, v);
    sum of times x + per_byte outputs (in + out) <= T, and memory as given by (bytes of each operator, limit).
    Raises ValueError where nothing fits.
    """
    import numpy as np

    n, ops = len(graph), graph.operators
    width = 3 * n * stages + 1
    x, coming, going = (lambda v, s, k=k: (k * n + v) * stages + s for k in range(3))
    rows = [({x(v, s): 1 for s in range(stages)}, 1, 1) for v in range(n)]
    for (u, v), s in product(graph.edges, range(stages)):
        # u is on one of the stages 0..s wherever v is
        rows.append(({x(u, t): 1 for t in range(s + 1)} | {x(v, t): -1 for t in range(s + 1)}, 0, np.inf))
        for flag, (a, b) in ((coming, (v, u)), (going, (u, v))):
            rows.append(({flag(u, s): 1, x(a, s): -1, x(b, s): 1}, 0, np.inf))
    for s in range(stages):
        row = {width - 1: 1} | {x(v, s): -times[v] for v in range(n)}
        row |= {way(v, s): -per_byte * ops[v].output for way in (coming, going) for v in range(n)}
        rows.append((row, 0, np.inf))
        if memory:
            rows.append(({x(v, s): memory[0][v] for v in range(n)}, 0, memory[1]))
    whole = np.append(np.ones(width - 1), 0)  # all but T
    found = integer_program(1 - whole, whole, np.append(np.ones(width - 1), np.inf), rows)
    if found.x is None:
        said = f"No {stages} stages fit: the memory limit is too small. Use more stages, or a larger limit."
        raise ValueError(said)
    on = [max(range(stages), key=lambda s: found.x[x(v, s)]) for v in range(n)]
    return float(found.fun), [tuple(v for v in range(n) if on[v] == s) for s in range(stages)]
