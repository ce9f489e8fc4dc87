"""How often a rank gathers each part of the weights, and sums its gradients, in a step of ZeRO.

In a pipeline this depends on the schedule: a part that several micro-batches use at once is gathered for them once.
"""

from collections import Counter
from functools import lru_cache

from ..parallel.zero.costs import gathers as gathers_of_a_micro_batch
from .share import RankShare, order_of, rank_parts


def reduce_counts(share: RankShare) -> Counter:
    """How often the gradients of each part are summed: once a step in stage 1, after every backward in 2 and 3."""
    if share.plan.zero < 2:
        return Counter(dict.fromkeys(share.sizes, 1))
    found = Counter()
    for stage, position in share.stages.items():
        units = sum(share.units(stage).values())
        for part, cut in share.sizes:
            found[part, cut] += _uses(share, part, position) * units
    return found


def _uses(share: RankShare, part: str, position: int) -> int:
    """Whether a backward of the stage at `position` gives gradients to a part: 0 or 1."""
    if part.startswith("h."):
        return int(part[2:]) in share.parts.layers[position]
    ends = {"wpe": (0,), "wte": (0,), "ln_f": (share.depth - 1,), "lm_head": (share.depth - 1,)}[part]
    return position in (*ends, *[share.depth - 1] * (part == share.net.head))


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
    order, weights = order_of(plan, plan.micro), _Weights(rank_parts(plan, config, rank), plan, head)
    for op in order.orders[rank]:
        position = order.position(op.stage)
        if op.kind == "F":
            weights.forward(position, graph=not plan.recompute)
        elif op.kind == "B" or op.kind == ("I" if position else "W"):
            weights.backward(position)
        if op.kind in "BW":
            weights.reduce(position)
    return weights.count


class _Weights:
    """Which parts are whole here, how often they are used, and which are on their way: `zero.stages.Zero3`, counted."""

    def __init__(self, here, plan, head):
        self.here, self.plan, self.count = here, plan, Counter()
        self.users, self.whole, self.coming, self.kept = Counter(), set(), set(), 0
        self.blocks = [f"h.{layer}" for layer in here.blocks]
        self.last = [head, "ln_f"] if here.last else []
        self.first = ["wte", "wpe"] if here.first else []

    def start(self, part: str) -> None:
        if part not in self.whole | self.coming:
            self.coming.add(part)
            self.count[part] += 1

    def gather(self, part: str) -> None:
        self.users[part] += 1
        self.start(part)
        self.coming.discard(part)
        self.whole.add(part)

    def release(self, part: str) -> None:
        self.users[part] -= 1
        if self.users[part] == 0:
            self.whole.discard(part)

    def prefetch(self, i: int) -> None:
        if self.plan.data != "owner" and i >= 0:
            for part in [self.blocks[i]] if i < len(self.blocks) else self.last:
                self.start(part)

    def forward(self, position: int, graph: bool) -> None:
        """The forward of a stage; with a graph the head's weights stay until its backward."""
        tied = [part for part in self.first if part in self.last]
        if position == 0:
            for part in self.first:
                self.gather(part)
            self.prefetch(0)
            for part in self.first:
                if part not in tied:
                    self.release(part)
            self.kept += 1
        for layer in self.here.layers[position]:
            i = self.blocks.index(f"h.{layer}")
            self.gather(self.blocks[i])
            self.prefetch(i + 1)
            self.release(self.blocks[i])
        if position == len(self.here.layers) - 1:
            for part in self.last:
                self.gather(part)
            if self.kept:
                self.kept -= 1
                for part in tied:
                    self.release(part)
            if not graph:
                self.leave_head()

    def leave_head(self) -> None:
        for part in self.last:
            self.release(part)

    def backward(self, position: int) -> None:
        """The backward of a stage up to its input's gradient; the blocks' weights stay until `reduce`."""
        if self.plan.recompute:
            self.forward(position, graph=True)
        if position == len(self.here.layers) - 1:
            self.leave_head()
        for layer in reversed(self.here.layers[position]):
            i = self.blocks.index(f"h.{layer}")
            self.gather(self.blocks[i])
            self.prefetch(i - 1)

    def reduce(self, position: int) -> None:
        """The gradients of a stage's blocks are complete."""
        for layer in self.here.layers[position]:
            if self.users[f"h.{layer}"]:
                self.release(f"h.{layer}")
