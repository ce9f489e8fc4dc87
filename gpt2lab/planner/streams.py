"""The moments of a stream without a flush at which a rank may hold most: several versions of its weights.

Narayanan et al. 2019, "PipeDream", section 3.3; Narayanan et al. 2021, "PipeDream-2BW", section 3.1.
"""

from ..parallel.pipeline.versions import stream_of, unread
from .kept import stream_bytes
from .moments import Walk
from .share import RankShare


def batches_until_full(plan) -> int:
    """Batches in a stream long enough that as many versions are there as ever will be."""
    return 2 + -(-2 * plan.pp // plan.micro)


class StreamWalk(Walk):
    """A stream of `batches_until_full` on one rank.

    The last stage keeps no version of the embedding: it gets each from the first stage, which gets its gradients. What
    an end has sent is held until it is sure to have been read. Between two stages are two messages each way, and for
    two more there is room.
    """

    def __init__(self, share: RankShare, moments: int):
        super().__init__(share, moments)
        plan, here = share.plan, share.parts
        self.table = stream_of(plan, batches_until_full(plan))
        own = [p.elements for p in share.parameters if not (here.last and p.name == "wte.weight")]
        self.own, self.largest = self.e * sum(own), self.e * max(own)  # bytes of a version, and of one tensor
        self.ends = self.e * self.wte  # 0 on stages between them
        self.now["optimizer"] = moments * self.own
        neighbours = 2 - here.first - here.last
        self.now["buffers"] += neighbours * 4 * stream_bytes(share, share.micro_rows[0], share.tokens)
        self.sent = 0

    def run(self) -> None:
        """All operations, each with the version that it reads; versions are exchanged tensor by tensor."""
        table, one, used = self.table, self.now["weights"], 0
        for op, versions in zip(table.schedule.orders[self.share.pp], table.held(self.share.pp), strict=True):
            if table.reads[op] != used:
                self.note(buffers=self.largest)
            used = table.reads[op]
            self.forward(op) if op.kind == "F" else self.backward(op)
            self.now["weights"] = one + self.own * (len(versions) - 1)
            if (made := table.makes(op)) is not None:
                used = made
                self._update()

    def _update(self) -> None:
        """A batch's gradients have made a version."""
        self.note(buffers=self.ends)  # the embedding's gradient: a copy that leaves, or what has arrived
        self.now["gradients"] = 0
        self.arrived.clear()
        if self.sent < unread(self.table):
            self.sent += 1
            self.now["buffers"] += self.ends
