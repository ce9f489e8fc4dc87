"""The least that a plan can cost, in microseconds of arithmetic: a search prices only plans that could still win.

Seconds: the operations of the busiest stage and what its tensor ranks gather and sum, the forwards of the stages before
it until its first micro-batch comes, and an update; or sums from machine to machine, where they take longer. Bytes:
weights, gradients and optimizer of the first stage, and the activations of the micro-batches in progress; or, where
that could still win, of the fullest stage. No other message and no logits are in it, so the tests can hold every
prediction above both.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter

import numpy as np

from ..plan import Plan
from .cost import classes
from .kept import inputs_only, kept_between, kept_by_dense_block, part_elements, stream_bytes, weights_held
from .models import units
from .problem import Cluster
from .seconds import UPDATE, RankOnCluster, block_work, embedding_work, groups_on_nodes, head_work, pairs_seen
from .share import RankShare, frame, order_of

# a backward gives both gradients, so that the last one passes all stages
JOINT = "1f1b", "interleaved", "gpipe"
WORK = attrgetter("pp", "dp", "cp", "tp", "micro", "schedule", "sp", "layout", "exchange")
STATE = attrgetter("zero", "refill", "shard", "recompute")


@lru_cache(maxsize=64)
def _passing(name: str, chunks: int) -> float:
    """How many micro-batches a schedule has on their way at once, by its stages; infinitely many where all may be."""
    order = order_of(Plan(pp=2, schedule=name, chunks=chunks), 12)
    first = [op.kind for op in order.orders[order.placement[0]] if op.stage == 0 and op.kind != "W"]
    most = max(accumulate(1 if kind == "F" else -1 for kind in first))
    return most / 2 if most < 12 else float("inf")


@lru_cache(maxsize=4096)
def _moments(name: str, pp: int, chunks: int, micro: int, rank: int) -> np.ndarray:
    """What a rank has whenever a unit runs on it, a row each, four numbers a stage.

    Units that wait for their backward, units that wait for its second half, 1 if one runs here, 1 if gradients are
    there. The embedding's stage does its whole backward in the second half.
    """
    order = order_of(Plan(pp=pp, schedule=name, chunks=chunks), micro)
    now, found = {stage: np.zeros(4, int) for stage in order.stages_of(rank)}, []
    for kind, stage, _ in order.orders[rank]:
        mine = now[stage]
        if kind == "W" and stage:
            mine += (0, -1, 0, 1 - mine[3])
        elif kind != "I" or stage:
            mine += (-(kind != "F"), 0, 1, 0)
            found.append(np.concatenate([*now.values()]))
            mine += (kind == "F", kind == "I", -1, (kind in "BW") * (1 - mine[3]))
    return np.unique(found, axis=0)


@dataclass
class Bounds:
    """What steps of `rows` sequences of `length` tokens of a model cost at least on a cluster, plan by plan."""

    config: object
    cluster: Cluster
    rows: int
    length: int
    itemsize: int = 4
    mixed: int = 0
    known: dict = field(default_factory=dict)

    def __post_init__(self):
        if self.config.experts:
            raise ValueError(
                "No plans are proposed for a mixture of experts, so none can be chosen. Ask about a dense model."
            )
        self.device, network = self.cluster.device.with_numbers(self.itemsize), self.cluster.network
        self.wire = max(link.bandwidth for link in (network.inside, network.between) if link)
        self.fastest = min((1.0, *(factor for _, factor in self.cluster.slowed)))  # some ranks may be faster

    def of(self, plan) -> tuple[float, float]:
        """(seconds, bytes), both at most what `cost.predict` says, however the loss is computed."""
        return self._once((WORK(plan), STATE(plan)), lambda: self._of(plan))

    def _of(self, plan) -> tuple[float, float]:
        share = RankShare(plan, self.config, self.rows, self.length, self.itemsize, mixed=self.mixed)
        mine = self.elements(share) / (share.sharing[0] if plan.zero else 1)
        update = self.fastest * UPDATE * share.master * mine / self.device.copy
        seconds = self._once((WORK(plan), share.again), lambda: self.seconds(share))
        sums = self.fastest * self.sums(share)
        # a backward of the largest micro-batch may hide more than most
        even = (self.rows // plan.dp // plan.micro) / -(-self.rows // (plan.dp * plan.micro))
        if plan.zero < 2:  # behind the last backward alone, or after it
            hidden = seconds * (plan.zero < 1) / max(1, plan.micro * even)
            return update + max(seconds, seconds + sums - hidden), self.bytes(share)
        return update + max(seconds, even * sums), self.bytes(share)

    def sums(self, share: RankShare) -> float:
        """Seconds of the first stage's gradients and weights from machine to machine, hidden or not.

        ZeRO-2 and 3 send them for every micro-batch (in a pipeline: once at least); of HSDP only the sums across.
        """
        plan, network, shared = share.plan, self.cluster.network, share.sharing[0]
        n, apart = plan.dp * plan.cp // (plan.shard or 1), plan.tp * (plan.shard or 1)
        lies = groups_on_nodes(n, apart, max(network.node, 1), plan.world)
        if lies.nodes == 1:
            return 0.0
        often = [plan.micro if plan.zero >= stage and plan.pp == 1 else 1 for stage in (3, 2)]
        each = (
            2 * share.master / shared if plan.shard else often[0] * self.itemsize + often[1] * share.gradient
        )
        return self.elements(share) * each * (1 - 1 / lies.nodes) / (lies.fewest * network.between.bandwidth)

    def rounds(self, share: RankShare, block: float) -> float:
        """Seconds in which all micro-batches pass the stages and come back, as many on their way as the schedule has.

        `block` is the least that a block's forward of a micro-batch takes.
        """
        plan, joint = share.plan, share.plan.schedule in JOINT
        flying = min(plan.micro, plan.pp * _passing(plan.schedule, plan.chunks))
        hops = sum(a != b for a, b in pairwise(frame(plan).placement))
        own = share.tokens // (plan.tp if plan.sp else 1)
        message = self.rows // plan.dp // plan.micro * own * share.config.n_embd * self.itemsize
        network, distance = self.cluster.network, plan.tp * plan.cp * plan.dp
        within = groups_on_nodes(plan.pp, distance, max(network.node, 1), plan.world).nodes == 1
        link = network.inside if within and network.inside else network.between
        there = 2 * hops * message / link.bandwidth
        work = share.config.n_layer * (2 + joint + share.again[0]) * block
        return plan.micro / flying * (there + work)

    def ideal(self, world: int) -> float:
        """Seconds of all operations, on so many ranks that all work all the time."""
        net, tokens = units(self.config), self.rows * self.length
        seen = self.rows * pairs_seen(RankShare(Plan(), self.config, 1, self.length), self.length)
        blocks = net.n_layer * (2 * net.multiplied * tokens + 4 * net.n_embd * seen)
        least = 3 * (blocks + 2 * net.n_embd * net.vocab_size * tokens) / (world * self.device.rate)
        return self.fastest * least

    def _once(self, key: tuple, make: Callable):
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def seconds(self, share: RankShare) -> float:
        """Seconds of the stage that ends last, its messages and its update apart."""
        plan, (blocks, ends), machine = share.plan, share.again, RankOnCluster(self.cluster, share)
        rows = -(-self.rows // plan.dp)
        unit, micro = (share, rows, share.tokens), rows / -(-rows // plan.micro)  # of all rows
        # stages share cores only where they work at the same time
        shared = machine.crowd if plan.pp > 1 else 1
        work = lambda flops, moved, each: machine.work(flops, moved, each * micro) / shared
        block = work(*block_work(*unit))
        if plan.sp:  # two gathers and two sums forward, four and two backward, as fast as the fastest link
            stream = rows * share.tokens * share.config.n_embd * self.itemsize
            once = (plan.tp - 1) / plan.tp * stream / self.wire
            block += (10 / (3 + blocks) + blocks * 4 / (3 + blocks)) * once
        before, most, joint = 0.0, 0.0, plan.schedule in JOINT
        layers, schedule = share.parts.layers, frame(plan)
        work_of = [len(own) * (3 + blocks) * block for own in layers]
        for position, (there, back) in ((0, embedding_work(*unit)), (-1, head_work(*unit))):
            work_of[position] += (1 + ends) * work(*there) + work(*back)
        mine = [0.0] * plan.pp
        for stage, rank in enumerate(schedule.placement):
            mine[rank] += work_of[stage % share.depth]
        for rank in range(plan.pp):
            most = max(most, before + mine[rank])
            least = rows // plan.micro / rows  # of a micro-batch
            before += len(layers[rank]) * (3 + blocks if joint else 1) * block * least
        return max(most, self.rounds(share, block * least)) if plan.pp > 1 else most

    def bytes(self, share: RankShare) -> float:
        """Bytes of the first stage: all of its state, or fewer gradients beside more activations."""
        plan, (state, gradients) = share.plan, self.state(share, self.elements(share))
        key = "kept", plan.dp, plan.cp, plan.tp, plan.micro, plan.sp, plan.exchange, share.again
        held = self._once(key, lambda: self.kept(share)) * len(share.parts.layers[0])
        if plan.pp > 1 and plan.recompute:
            return state + gradients
        flying, more = min(plan.micro, plan.pp), plan.micro > plan.pp
        return state + max(gradients, held * flying, (gradients + held * (flying - (plan.pp > 1))) * more)

    def state(self, share: RankShare, weights: int) -> tuple[float, float]:
        """Bytes of a stage's weights and optimizer, and of its gradients in the end."""
        plan, shards = share.plan, weights / share.sharing[0]
        mine = shards if plan.zero else weights
        gradients = (share.mixed or share.master) * shards if plan.zero > 1 else share.gradient * weights
        return 2 * share.master * mine + weights_held(share, mine, weights), gradients

    def fullest(self, plan) -> float:
        """Bytes of the fullest stage, at most what `cost.predict` says: nearer to it than `of`, and takes longer."""
        share = RankShare(plan, self.config, self.rows, self.length, self.itemsize, mixed=self.mixed)
        key = "stages", plan.pp, plan.schedule, plan.chunks
        stages = self._once(key, lambda: [one.pp for one in classes(share)])
        return max(self.filled(replace(share, pp=stage)) for stage in stages)

    def filled(self, share: RankShare) -> float:
        """Bytes of a stage: all of its state, or fewer gradients beside the units that it has at once."""
        plan, unit = share.plan, (min(share.micro_rows), share.tokens)
        state, gradients = self.state(share, weights := self.elements(share))
        block = sum(part_elements(share, f"h.{layer}") for layer in share.parts.blocks[:1])  # all are alike
        stream, kept, costs = stream_bytes(share, *unit), self.kept(share), []
        for position in share.stages.values():
            layers = len(share.parts.layers[position])
            waits = stream * (position > 0) if plan.pp > 1 and plan.recompute else layers * kept
            # as amid the pipeline: at its end the head's wait too
            halves = kept_between(share, 0, *unit, layers) if plan.pp > 1 else 0
            costs += waits, halves, layers * kept, layers * block * gradients / weights
        asked = plan.schedule, plan.pp, plan.chunks, min(plan.micro, 2 * plan.pp), share.pp
        return state + max(gradients, (_moments(*asked) @ costs).max().item())

    def elements(self, share: RankShare) -> int:
        """Weights of a stage."""
        key = "elements", share.pp, share.plan.pp, share.plan.tp, share.plan.schedule, share.plan.chunks
        return self._once(key, lambda: sum(share.sizes.values()))

    def kept(self, share: RankShare) -> int:
        """Bytes that a block keeps of the smallest micro-batch."""
        rows, tokens = min(share.micro_rows), share.tokens
        return (stream_bytes if inputs_only(share) else kept_by_dense_block)(share, rows, tokens)
