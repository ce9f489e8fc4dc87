"""The least that a plan can cost, in microseconds of arithmetic: a search prices only plans that could still win.

Seconds: the operations of the busiest stage and what its tensor ranks gather and sum, the forwards of the stages before
it until its first micro-batch comes, and an update; or sums from machine to machine, where they take longer. Bytes:
weights, gradients and optimizer of the first stage, and the activations of the micro-batches in progress. No other
message and no logits are in it, so the tests can hold every prediction above both.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from ..plan import Plan
from .kept import kept_by_dense_block, stream_bytes, weights_held
from .models import units
from .problem import Cluster
from .seconds import UPDATE, RankOnCluster, block_work, embedding_work, groups_on_nodes, head_work, pairs_seen
from .share import RankShare, frame

# a backward gives both gradients, so that the last one passes all stages
JOINT = "1f1b", "interleaved", "gpipe"
WORK = attrgetter("pp", "dp", "cp", "tp", "micro", "schedule", "sp", "layout", "exchange")
STATE = attrgetter("zero", "refill", "shard", "recompute")


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

    def of(self, plan) -> tuple[float, float]:
        """(seconds, bytes), both at most what `cost.predict` says, however the loss is computed."""
        return self._once((WORK(plan), STATE(plan)), lambda: self._of(plan))

    def _of(self, plan) -> tuple[float, float]:
        share = RankShare(plan, self.config, self.rows, self.length, self.itemsize, mixed=self.mixed)
        mine = self.elements(share) / (share.sharing[0] if plan.zero else 1)
        update = UPDATE * share.master * mine / self.device.copy
        seconds = self._once((WORK(plan), share.again), lambda: self.seconds(share))
        return update + max(seconds, self.sums(share)), self.bytes(share)

    def sums(self, share: RankShare) -> float:
        """Seconds of the first stage's gradients and new weights from machine to machine, however much is hidden."""
        plan, network, n = share.plan, self.cluster.network, share.sharing[0]
        lies = groups_on_nodes(n, plan.tp, max(network.node, 1), max(plan.world, n * plan.tp))
        if lies.nodes == 1 or plan.shard:
            return 0.0
        size = self.elements(share) * (self.itemsize + share.gradient) * (1 - 1 / lies.nodes)
        rows, micro = self.rows // plan.dp, plan.micro
        # a backward of the largest micro-batch may hide more than most
        even = (rows // micro) / -(-self.rows // (plan.dp * micro))
        return even * size / (lies.fewest * network.between.bandwidth)

    def ideal(self, world: int) -> float:
        """Seconds of all operations, on so many ranks that all work all the time."""
        net, tokens = units(self.config), self.rows * self.length
        seen = self.rows * pairs_seen(RankShare(Plan(), self.config, 1, self.length), self.length)
        blocks = net.n_layer * (2 * net.multiplied * tokens + 4 * net.n_embd * seen)
        return 3 * (blocks + 2 * net.n_embd * net.vocab_size * tokens) / (world * self.device.rate)

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
        if plan.sp:  # two gathers and two sums forward, three and two backward, as fast as the fastest link
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
            mine[rank] += work_of[schedule.position(stage)]
        for rank in range(plan.pp):
            most = max(most, before + mine[rank])
            least = rows // plan.micro / rows  # of a micro-batch
            before += len(layers[rank]) * (3 + blocks if joint else 1) * block * least
        return most

    def bytes(self, share: RankShare) -> float:
        """Bytes of the first stage: all of its state, or fewer gradients beside more activations."""
        plan, master, weights = share.plan, share.master, self.elements(share)
        shards = weights / share.sharing[0]
        mine = shards if plan.zero else weights
        state = 2 * master * mine + weights_held(share, mine, weights)
        gradients = (share.mixed or master) * shards if plan.zero > 1 else share.gradient * weights
        key = "kept", plan.dp, plan.cp, plan.tp, plan.micro, plan.sp, plan.exchange, share.again
        held = self._once(key, lambda: self.kept(share)) * len(share.parts.layers[0])
        if plan.pp > 1 and plan.recompute:
            return state + gradients
        flying, more = min(plan.micro, plan.pp), plan.micro > plan.pp
        return state + max(gradients, held * flying, (gradients + held * (flying - (plan.pp > 1))) * more)

    def elements(self, share: RankShare) -> int:
        """Weights of the first stage."""
        key = "elements", share.plan.pp, share.plan.tp, share.plan.schedule, share.plan.chunks
        return self._once(key, lambda: sum(share.sizes.values()))

    def kept(self, share: RankShare) -> int:
        """Bytes that a block keeps of the smallest micro-batch."""
        rows, tokens = min(share.micro_rows), share.tokens
        if share.again[0] and share.plan.pp == 1:
            return stream_bytes(share, rows, tokens)
        return kept_by_dense_block(share, rows, tokens)
