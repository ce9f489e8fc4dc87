"""How often a rank gathers each part of the weights, and sums its gradients, in a step of ZeRO.

In a pipeline this depends on the schedule: a part that several micro-batches use at once is gathered for them once.
"""

from collections import Counter, deque
from collections.abc import Iterator
from functools import lru_cache

from ..parallel.zero.costs import gathers as gathers_of_a_micro_batch
from .share import RankShare, order_of, rank_parts


def reduce_counts(share: RankShare) -> Counter:
    """How often the gradients of each part are summed: once a step in stage 1, after every backward in 2 and 3."""
    if share.plan.zero < 2:
        return Counter(dict.fromkeys(share.sizes, 1))
    found = Counter()
    for stage, position in share.stages.items():
        parts, units = share.parts_at(position), sum(share.units(stage).values())
        found.update({key: units for key in share.sizes if key[0] in parts})
    return found


def gather_counts(share: RankShare) -> Counter:
    """How often the weights of each part are gathered: after the update in stages 1 and 2, around each use in 3."""
    if share.plan.zero < 3:
        return Counter(dict.fromkeys(share.sizes, 1))
    if share.plan.pp == 1:
        return Counter({key: share.plan.micro * gathers_of_a_micro_batch(key[0]) for key in share.sizes})
    found = _replayed(share.plan, share.config, share.pp, share.net.head)
    return Counter({key: found[key[0]] for key in share.sizes})


@lru_cache(maxsize=1024)
def _replayed(plan, config, rank: int, head: str) -> Counter:
    """The gathers of one rank of a pipeline, by part, from running its schedule without any numbers."""
    order, weights = order_of(plan, plan.micro), WholeWeights(rank_parts(plan, config, rank), plan, head)
    for op in order.orders[rank]:
        position = order.position(op.stage)
        if op.kind == "F":
            deque(weights.forward(position, graph=not plan.recompute), maxlen=0)
        elif op.kind == "B" or op.kind == ("I" if position else "W"):
            if plan.recompute:
                deque(weights.forward(position, graph=True), maxlen=0)
            deque(weights.backward(position, op.kind == "I"), maxlen=0)
        else:
            weights.reduce(position)
    return weights.count


class WholeWeights:
    """How many users each whole part has here, and which are on their way: `zero.stages.Zero3`, counted.

    The two passes stop at the ends and at each block, when all that is whole then is here or on its way.
    """

    def __init__(self, here, plan, head):
        self.here, self.plan, self.kept = here, plan, 0
        self.count, self.users, self.coming = Counter(), Counter(), set()
        self.blocks = [f"h.{layer}" for layer in here.blocks]
        self.last = [head, "ln_f"] if here.last else []
        self.first = ["wte", "wpe"] if here.first else []

    def start(self, parts) -> None:
        """Gather what is neither here nor on its way."""
        new = [part for part in parts if part not in self.users and part not in self.coming]
        self.coming.update(new)
        self.count.update(new)

    def use(self, parts) -> None:
        """Have these parts whole until they are left as often."""
        self.start(parts)
        self.coming.difference_update(parts)
        self.users.update(parts)

    def leave(self, parts) -> None:
        """Free what nobody else uses."""
        self.users -= Counter(parts)

    def prefetch(self, i: int) -> None:
        """Start to gather a block, or after the last one the head."""
        if self.plan.data != "owner" and i >= 0:
            self.start(self.blocks[i : i + 1] or self.last)

    def numbers(self, position: int) -> list[int]:
        """Which of the blocks here a position has."""
        return [self.blocks.index(f"h.{layer}") for layer in self.here.layers[position]]

    def forward(self, position: int, graph: bool) -> Iterator[str]:
        """The forward of a stage; with a graph the head's weights stay until its backward."""
        tied = [part for part in self.first if part in self.last]
        if position == 0:
            self.use(self.first)
            self.prefetch(0)
            yield "wte"
            self.leave([part for part in self.first if part not in tied])
            self.kept += 1
        for i in self.numbers(position):
            self.use(self.blocks[i : i + 1])
            self.prefetch(i + 1)
            yield self.blocks[i]
            self.leave(self.blocks[i : i + 1])
        if position == len(self.here.layers) - 1:
            self.use(self.last)
            if self.kept:
                self.kept -= 1
                self.leave(tied)
            yield "ln_f"
            if not graph:
                self.leave(self.last)

    def backward(self, position: int, half: bool = False) -> Iterator[str]:
        """The backward of a stage; of a first half the blocks' weights stay until `reduce`."""
        if position == len(self.here.layers) - 1:
            yield "ln_f"
            self.leave(self.last)
        for i in reversed(self.numbers(position)):
            self.use(self.blocks[i : i + 1])
            self.prefetch(i - 1)
            yield self.blocks[i]
            if not half:
                self.leave(self.blocks[i : i + 1])

    def reduce(self, position: int) -> None:
        """The gradients of a stage's blocks are complete, which a first half left."""
        self.leave([part for layer in self.here.layers[position] if (part := f"h.{layer}") in self.users])
