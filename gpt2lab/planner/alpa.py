"""Alpa: operators clustered, stages on submeshes by dynamic programming, cuts inside a stage by an integer program.

Zheng et al. 2022, "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", sections
4 and 5.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import inf

from ..machine.arguments import checked
from ..machine.patience import patiently
from .cuts import ChainPlan, ChainProblem, CutOperator, block_mesh, merged
from .graph_stages import integer_program


@checked(layers=(1, 10_000), slack=0)
def clustered(operators: Sequence[CutOperator], layers: int, slack: float = 0.5) -> tuple[CutOperator, ...]:
    """So many layers of neighbouring operators (`cluster_bounds`)."""
    bounds = cluster_bounds([op.flops for op in operators], [op.output for op in operators], layers, slack)
    return tuple(merged(operators[a:b]) for a, b in pairwise(bounds))


@checked(flops=0, outputs=0, layers=(1, 10_000), slack=0)
def cluster_bounds(flops: Sequence[float], outputs: Sequence[int], layers: int, slack: float = 0.5):
    """The bounds of layers, none above (1 + slack) of an even share of the operations (or the largest operator alone).

    Of those whose largest input is smallest they are the one with the most even operations. Section 5.2: first
    G(k, r) = min over i of max(G(i, r - 1), bytes into i..k), then a second program for the squares of operations.
    Raises ValueError where no bounds keep the share.
    """
    if len(outputs) != len(flops):
        raise ValueError(f"{len(flops)} operators have {len(outputs)} outputs. Give one for each.")
    n, most = len(flops), max((1 + slack) * sum(flops) / layers, *flops)
    size = lambda i: outputs[i - 1] if i else 0

    def best(cost, limit=inf, join=max):
        rows = {(0, 0): (0, (0,))}
        for r in range(1, layers + 1):
            for k in range(r, n + 1):
                ways = [
                    (join((rows[i, r - 1][0], cost(i, k))), (*rows[i, r - 1][1], k))
                    for i in range(r - 1, k)
                    if (i, r - 1) in rows and sum(flops[i:k]) <= most and size(i) <= limit
                ]
                if ways:
                    rows[k, r] = min(ways)
        return rows.get((n, layers))

    first = best(lambda i, k: size(i))
    if first is None:
        raise ValueError(
            f"{n} operators cannot form {layers} layers of at most {1 + slack:g} times an even share of the "
            "operations. Allow more slack, or use another number of layers."
        )
    return best(lambda i, k: sum(flops[i:k]) ** 2, first[0], sum)[1]


MOST = 2000  # nodes: two million blocks


@checked(devices=(1, 10**6), node=1)
def submeshes(devices: int, node: int) -> list[tuple[int, int]]:
    """Blocks (first, count) of a power of two of a node's devices, or of whole nodes: shapes that fill any cluster."""
    node = min(node, devices)
    if (nodes := devices // node) > MOST:
        raise ValueError(f"{nodes:,} nodes have too many blocks. Use at most {MOST:,}, or larger nodes.")
    sizes = [2**p for p in range(node.bit_length()) if 2**p < node]
    inside = [(d, size) for d in range(devices) for size in sizes if d % node + size <= node]
    first = range(0, devices, node)
    return inside + [(d, k * node) for d in first for k in range(1, (devices - d) // node + 1)]


@checked(costs=(-inf, inf), changes=(-inf, inf), memory=(0, inf), limit=(0, inf))
def intra_operator(
    costs: Sequence[Sequence[float]],
    changes: Mapping[tuple[int, int], Sequence[Sequence[float]]],
    memory: Sequence[Sequence[float]] = (),
    limit: float = inf,
) -> tuple[float, list[int]]:
    """(cost, strategy of every operator) with the least sum of costs[v][i] and changes[v, u][i][j], by HiGHS.

    s[v, i] is 1 where operator v uses strategy i. The product s[v, i] s[u, j] of an edge is a variable e of its own:
    its rows sum to s[v], its columns to s[u]. `memory`[v][i] bytes must not exceed the limit together.
    Cost and strategies are inf and [] where nothing fits. Section 4.2.
    """
    import numpy as np

    first, width = [], 0
    for row in costs:
        first.append(width)
        width += len(row)
    whole, target = width, [c for row in costs for c in row]
    rows = [({first[v] + i: 1 for i in range(len(row))}, 1, 1) for v, row in enumerate(costs)]
    for (v, u), matrix in changes.items():
        many, few = len(costs[v]), len(costs[u])
        for i in range(many):
            rows.append(({width + i * few + j: 1 for j in range(few)} | {first[v] + i: -1}, 0, 0))
        for j in range(few):
            rows.append(({width + i * few + j: 1 for i in range(many)} | {first[u] + j: -1}, 0, 0))
        target += [matrix[i][j] for i in range(many) for j in range(few)]
        width += many * few
    if limit < inf:
        held = {first[v] + i: m / limit for v, row in enumerate(memory) for i, m in enumerate(row)}
        rows.append((held, 0, 1))
    target = np.array(target)
    able = np.isfinite(target)
    scale = max(target[able].max(initial=0), 1e-300)
    found = integer_program(
        np.where(able, target, 0) / scale, np.arange(width) < whole, able.astype(float), rows
    )
    if found.x is None:
        return inf, []
    chosen = [int(np.argmax(found.x[a : a + len(row)])) for a, row in zip(first, costs, strict=True)]
    cost = sum(row[i] for row, i in zip(costs, chosen, strict=True))
    return cost + sum(matrix[chosen[v]][chosen[u]] for (v, u), matrix in changes.items()), chosen


class Stages:
    """Prices of all stages of a problem: the best cuts of operators first .. last - 1 on a block, once each."""

    def __init__(self, problem: ChainProblem, space):
        self.problem, self.priced = problem, 0
        self.on = [{} for _ in space]
        for n, row in enumerate(space):
            for at in row:
                self.on[n].setdefault((at.first, at.count), []).append(at)
        self.price = cache(self._price)

    def blocks(self, first: int) -> list[tuple[int, int]]:
        """The blocks that begin with this device."""
        return sorted({block for row in self.on for block in row if block[0] == first})

    def _price(self, a: int, b: int, block: tuple[int, int], behind: int) -> tuple[float, ChainPlan]:
        problem, memory = self.problem, self.problem.cluster.device.memory
        options = [row.get(block, []) for row in self.on[a:b]]
        if not all(options):
            return inf, ()
        self.priced += 1
        costs = [[problem.work(n, at) for at in row] for n, row in enumerate(options, a)]
        if a:
            near = block[0] % problem.cluster.network.node > 0
            costs[0] = [c + problem.enter(a, at, near) for c, at in zip(costs[0], options[0], strict=True)]
        changes = {
            (n, n + 1): [[problem.change(x.cut, y.cut, block) for y in options[n + 1]] for x in options[n]]
            for n in range(b - a - 1)
        }
        held = [[problem.held(n, at, behind) for at in row] for n, row in enumerate(options, a)]
        seconds, chosen = intra_operator(costs, changes, held, memory)
        return seconds, tuple(row[i] for row, i in zip(options, chosen, strict=False))


def fastest_pipeline(problem: ChainProblem, space) -> tuple[ChainPlan | None, float, int]:
    """(plan, seconds, stages priced) of the fastest pipeline on submeshes that fill the cluster in order.

    No plan where nothing fits. Seconds are sum t_i + (B - 1) max t_j: for each possible t_max, from small to large,
    F(s, k, d) = min over the next stage of its seconds, at most t_max, and F(s - 1, ...): s stages for the operators
    from k on the devices from d on. Once B t_max is no better than the best plan nothing further can be. Section 5.2.
    """
    stages, n, devices = Stages(problem, space), len(problem), problem.cluster.devices
    finite, micros = problem.cluster.device.memory < inf, problem.micros

    def price(k, end, block, s):
        return stages.price(k, end, block, min(s, micros) - 1 if finite else 0)

    depth = min(n, devices)
    every = {
        price(k, end, block, s)[0]
        for k in patiently(range(n), "first operators of stages")
        for end in range(k + 1, n + 1)
        for d in range(devices)
        for block in stages.blocks(d)
        for s in range(1, depth + 1 if finite else 2)
    }
    best, plan = inf, None
    for limit in sorted(every - {inf}):
        if micros * limit >= best:
            break
        for s in range(1, depth + 1):
            seconds, found = _stages_below(stages, price, limit, s, n, devices)
            if seconds + (micros - 1) * limit < best:
                best, plan = seconds + (micros - 1) * limit, found
    return plan, best, stages.priced


def _stages_below(stages, price, limit, count, n, devices) -> tuple[float, ChainPlan | None]:
    """F(count, 0, 0): the least sum of seconds of so many stages, none above the limit, and their plan."""

    @cache
    def best(s, k, d):
        if s == 0:
            return (0.0, ()) if k == n and d == devices else (inf, None)
        found = inf, None
        for block in stages.blocks(d):
            for end in range(k + 1, n - s + 2):
                seconds, chosen = price(k, end, block, s)
                if seconds > limit:
                    continue
                rest, after = best(s - 1, end, d + block[1])
                if seconds + rest < found[0]:
                    found = seconds + rest, (*chosen, *after)
        return found

    return best(count, 0, 0)


@checked(operators=(1, 10**4), devices=(1, 10**4), node=1, cuts=1)
def count_pipelines(operators: int, devices: int, node: int, cuts: int) -> int:
    """How many pipelines there are: stages of neighbouring operators on submeshes that fill the cluster in order.

    Every operator has `cuts` choices for each axis of its block that has more than one device. The recurrence is the
    planner's, with + for min and x for +.
    """
    kinds = {b: cuts ** sum(n > 1 for n in block_mesh(*b, node).values()) for b in submeshes(devices, node)}
    # no operator is left, and the last one was on this block
    ways = {b: int(sum(b) == devices) for b in kinds}
    for _ in range(operators):
        start = [0] * (devices + 1)
        for b, kind in kinds.items():
            start[b[0]] += kind * ways[b]
        ways = {b: kind * ways[b] + start[sum(b)] for b, kind in kinds.items()}
    return start[0]
