"""How long a rank of a plan works and sends: one stage, one unit of work, on the devices and links of a cluster."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial

from ..machine.links import Link, all_reduce_time
from ..parallel.context.costs import pairs
from ..parallel.context.layouts import layout
from .kept import part_elements
from .problem import Cluster, Device
from .sends import AxisTraffic, stage_ways
from .share import RankShare

UPDATE = 9  # times that AdamW and the norm read or write a weight's bytes
OPERATORS = 12  # of a block's forward, each a launch; twice as many in backward
_with_numbers = lru_cache(maxsize=64)(Device.with_numbers)
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times that a ring goes around


@dataclass(frozen=True)
class Lies:
    """How groups of ranks lie on nodes: most `nodes` of a group, `fewest` ranks of one in a node.

    `even`: every group has equally many ranks in each of its nodes.
    """

    nodes: int
    fewest: int
    even: bool


@lru_cache(maxsize=4096)
def groups_on_nodes(ranks: int, distance: int, node: int, world: int) -> Lies:
    """The groups of `ranks` that are `distance` apart, in a world of ranks that fill nodes of `node` one by one."""
    block = ranks * distance
    period = min(world, math.lcm(block, node))  # then all repeats
    groups = [
        Counter((start + first + distance * i) // node for i in range(ranks))
        for start in range(0, period, block)
        for first in range(min(distance, world - start - distance * (ranks - 1)))
    ]
    split = [g for g in groups if len(g) > 1] or groups
    even = all(len(set(g.values())) == 1 for g in groups)
    return Lies(max(map(len, groups)), min(min(g.values()) for g in split), even)


@dataclass(frozen=True, eq=False)
class RankOnCluster:
    """A cluster as the ranks of one plan see it: their mesh laid out on it, tensor ranks nearest to each other."""

    cluster: Cluster
    share: RankShare

    @cached_property
    def device(self) -> Device:
        """A device at the rate of the share's numbers."""
        return _with_numbers(self.cluster.device, self.share.itemsize)

    @cached_property
    def crowd(self) -> float:
        """How many ranks share a core."""
        here = min(self.share.plan.world, max(self.cluster.network.node, 1))
        return max(1.0, here / self.cluster.cores) if self.cluster.cores else 1.0

    @cached_property
    def slowed(self) -> float:
        """How many times as long as in the rest of the cluster's numbers everything takes with so many ranks."""
        return next((f for ranks, f in reversed(self.cluster.slowed) if ranks <= self.share.plan.world), 1.0)

    @property
    def overlaps(self) -> bool:
        """Whether messages travel beside work: devices with cores of their own, not ranks that share the machine's."""
        return not self.cluster.cores

    @cached_property
    def rings(self) -> dict[str, tuple[int, int]]:
        """(ranks, distance of neighbours) of every axis of the mesh."""
        plan = self.share.plan
        shard = plan.shard or plan.dp * plan.cp
        return {
            "tp": (plan.tp, 1),
            "cp": (plan.cp, plan.tp),
            "dp+cp": (shard, plan.tp),
            "replica": (plan.dp * plan.cp // shard, plan.tp * shard),
            "pp": (plan.pp, plan.tp * plan.cp * plan.dp),
            "tie": (2, plan.tp * plan.cp * plan.dp * (plan.pp - 1)),
            "world": (plan.world, 1),
            "ep": (plan.ep, 1),
            "edp+cp": (plan.dp // plan.ep, plan.ep),
        }

    def on_nodes(self, axis: str) -> Lies:
        """How the groups of an axis lie on the nodes."""
        return groups_on_nodes(*self.rings[axis], max(self.cluster.network.node, 1), self.share.plan.world)

    def crosses(self, axis: str) -> bool:
        """Whether a group of the axis has ranks in several nodes."""
        return self.cluster.network.node > 1 and self.on_nodes(axis).nodes > 1

    @cached_property
    def times(self) -> Callable[[int, int, int], dict[str, dict[str, float]]]:
        """Seconds of one unit, (stage, rows, tokens), each computed once: see `_stage_times`."""
        return cache(partial(_stage_times, self))

    def link(self, axis: str) -> Link:
        """The slowest link between neighbours of an axis, on which each rank has its card of its node."""
        network = self.cluster.network
        within = network.node > 1 and not self.crosses(axis)
        return (network.inside if within else None) or network.between

    def travel(self, sent: Iterable[AxisTraffic]) -> Counter:
        """Seconds by axis of messages one after the other."""
        found, crowd, call = Counter(), self.crowd * self.slowed, self.cluster.call
        for s in sent:
            seconds = self._collective(s) if s.op in PASSES and s.messages else self._direct(s)
            found[s.axis] += crowd * (seconds + call * s.calls * bool(s.messages))
        return found

    def _direct(self, s: AxisTraffic) -> float:
        """Seconds of messages to single ranks; of an all-to-all only what is for other nodes leaves the node."""
        link = self.link(s.axis)
        if s.op != "all_to_all" or not self.crosses(s.axis):
            return link.time(s.bytes, s.messages)
        n, here = self.rings[s.axis][0], self.on_nodes(s.axis).fewest
        away, inside = (n - here) / (n - 1), self.cluster.network.inside or link
        return max(link.time(s.bytes * away, s.messages), inside.time(s.bytes * (1 - away), s.messages))

    def _collective(self, s: AxisTraffic) -> float:
        """Seconds of sums and gathers: as a ring, level by level, or (small sums) by doubling, whichever is fastest.

        A ring that leaves nodes has as many channels as its group has cards in a node, each carries its share. Level
        by level: a ring inside each node, then, for each place in a node, a ring of those ranks, one in every node.
        """
        n, passes, link = self.rings[s.axis][0], PASSES[s.op], self.link(s.axis)
        whole = s.bytes / s.calls * n / (passes * (n - 1))  # bytes of the tensor that is summed or gathered
        ways = [link.time(s.bytes, s.messages)]
        if s.op == "all_reduce":
            ways.append(s.calls * all_reduce_time("recursive doubling", n, whole, link))
        if self.crosses(s.axis):
            lies, inside = self.on_nodes(s.axis), self.cluster.network.inside or link
            cards = Link(link.latency, link.bandwidth * lies.fewest)
            ways.append(Link(link.latency, min(cards.bandwidth, inside.bandwidth)).time(s.bytes, s.messages))
            if lies.even and lies.fewest > 1:
                k, m = lies.fewest, lies.nodes
                half = inside.time((k - 1) / k * whole, k - 1) + cards.time((m - 1) / m * whole, m - 1)
                ways.append(passes * s.calls * half)
        return min(ways)

    def work(self, flops: float, moved: float, operators: float) -> float:
        """Seconds of operators with so many operations and so many bytes read and written element by element."""
        device, slower = self.device, self.crowd * self.slowed
        return slower * (flops / device.rate + moved / device.copy + operators * device.launch)


def _stage_times(machine: RankOnCluster, stage: int, rows: int, tokens: int) -> dict[str, dict[str, float]]:
    """Seconds of one unit through a stage: {"forward", "again", "backward"}, each by part."""
    share, position = machine.share, machine.share.stages[stage]
    layers, last = len(share.parts.layers[position]), position == share.depth - 1
    block = layers * machine.work(*block_work(share, rows, tokens))
    ends = [embedding_work(share, rows, tokens)] * (position == 0) + [head_work(share, rows, tokens)] * last
    there, back = (sum(machine.work(*one[way]) for one in ends) for way in (0, 1))
    found = {
        "forward": {"compute": block + there},
        "again": {"recompute": share.again[0] * block + share.again[1] * there},
        "backward": {"compute": 2 * block + back + _added(machine, stage)},
    }
    for way, sent in stage_ways(share, stage, rows, tokens).items():
        found[way] |= machine.travel(s for s in sent if s.axis != "pp")
    return found


def _added(machine: RankOnCluster, stage: int) -> float:
    """Seconds in which a unit's gradients are added to those before: all but the first, shared out evenly."""
    share, position = machine.share, machine.share.stages[stage]
    units = len(share.micros(stage)) * len(share.slices)
    parts = share.parts_at(position) - {"wpe", "ln_f"}  # which are small
    weights = share.gradient * sum(part_elements(share, part) for part in parts)
    return machine.work(0, machine.device.add * weights * (units - 1) / units, 0)


def routed(machine: RankOnCluster) -> float:
    """Seconds in which a step of a mixture computes more than the dense model.

    Products of the second to k-th expert of a token, three operators an expert, rows gathered and combined.
    """
    share, experts = machine.share, machine.share.config.experts
    if not experts:
        return 0.0
    passes, c, tokens = 3 + share.again[0], share.config.n_embd, sum(share.micro_rows) * share.tokens
    here = experts.experts // share.plan.ep
    return len(share.mixtures) * machine.work(
        passes * 16 * c * c * tokens * (experts.top_k - 1),
        passes * 4 * share.itemsize * c * tokens * experts.top_k,
        passes * 3 * share.plan.micro * (here - 1),
    )


def block_work(share: RankShare, rows: int, tokens: int) -> tuple[float, float, int]:
    """(operations, bytes, operators) of a block's forward: four products, attention's two, and what is in between."""
    config, plan, n = share.config, share.plan, rows * tokens
    c, net = config.n_embd, share.net
    seen = pairs_seen(share, tokens) * rows
    flops = (2 * net.multiplied * n + 4 * c * seen) / plan.tp
    cut = 4 * c + 2 * net.keys + 2 * net.active * (2 + net.gated) * net.mlp  # GPT-2's: 22 C
    moved = share.itemsize * n * (12 * c / (plan.tp if plan.sp else 1) + cut / plan.tp)
    return flops, moved, OPERATORS


def pairs_seen(share: RankShare, tokens: int) -> float:
    """(query, key) pairs of a row's attention: those of the rank with most of them."""
    window, length = share.config.window, share.length
    if share.table is not None and share.plan.exchange != "heads":
        return _most_pairs(share.plan.layout, length, share.plan.cp, window)
    return causal_pairs(length, window) * tokens / length


def causal_pairs(length: int, window: int | None) -> float:
    """(query, key) pairs of a row's attention that are computed: each token sees itself and those before."""
    longest = length if window is None else min(length, window + 1)
    return longest * (longest + 1) / 2 + (length - longest) * longest


@lru_cache(maxsize=4096)
def _most_pairs(name: str, length: int, ranks: int, window: int | None) -> int:
    return max(pairs(layout(name, length, ranks), rank, window) for rank in range(ranks))


def embedding_work(share: RankShare, rows: int, tokens: int) -> tuple[tuple, tuple]:
    """The embedding's forward and backward; backward writes a gradient for the whole vocabulary."""
    c, e, n = share.config.n_embd, share.itemsize, rows * tokens
    table = share.config.vocab_size * c / share.plan.tp
    return (0, 4 * e * n * c, 3), (0, e * (4 * n * c + 4 * table), 3)


def head_work(share: RankShare, rows: int, tokens: int) -> tuple[tuple, tuple]:
    """The head with its loss, forward and backward."""
    c, e, n = share.config.n_embd, max(4, share.itemsize), rows * tokens
    words = share.config.vocab_size / share.plan.tp
    flops = 2 * c * words * n
    return (flops, 4 * e * n * words, 6), (2 * flops, e * (5 * n * words + 2 * words * c), 6)
