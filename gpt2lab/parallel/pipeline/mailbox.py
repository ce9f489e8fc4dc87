"""Messages between pipeline ranks during one step: posted early, matched in the order of sending.

Two ranks that both send first and receive later wait for each other forever. Here every receive is posted before it is
needed, two for each neighbour (double buffering), in exactly the order in which the neighbour's schedule sends; so no
message needs a label. A sender does not wait, except when `buffers` messages of its kind are unread: then it waits for
the oldest, which will be read because the schedule was checked.
"""

from collections import defaultdict, deque
from collections.abc import Callable

import torch

from ...ranks import comm, trace
from ...ranks.mesh import Axis
from ...schedules import Op, Schedule, ScheduleError, check


def buffers_needed(schedule: Schedule) -> int:
    """How many unread messages a link must hold so that the schedule cannot deadlock; at least 2, for overlap."""
    count = schedule.units if schedule.replicas else 2  # replicas also wait for each other
    while count < schedule.units:
        try:
            check(schedule, buffers=count)
            break
        except ScheduleError:
            count *= 2
    return count


class Mailbox:
    """The messages of one rank in one step of a schedule.

    `like(op)` makes an empty tensor of the shape that a forward takes or a backward gets. A result is named by the
    operation that waits for it: Op("F", 2, 0) is the input of stage 2's forward, Op("I", 2, 0) the
    gradient of its output, both for micro-batch 0.
    """

    def __init__(self, schedule: Schedule, axis: Axis, like: Callable[[Op], torch.Tensor], buffers: int):
        self.schedule, self.axis, self.like, self.buffers = schedule, axis, like, buffers
        self.units = schedule.units  # fewer where a stream ends early: nothing of later ones is asked for
        self.coming = {r: deque(ops) for r, ops in schedule.incoming[axis.rank].items()}
        self.source = {op: r for r, ops in self.coming.items() for op in ops}
        self.posted: dict[Op, comm.Handle] = {}
        self.here: dict[Op, torch.Tensor] = {}  # results between stages of this rank
        self.leaving: dict[tuple, deque[comm.Handle]] = defaultdict(deque)
        for rank in self.coming:
            for _ in range(2):
                self._post(rank)

    def _post(self, rank: int) -> None:
        if self.coming[rank] and self.coming[rank][0].micro < self.units:
            op = self.coming[rank].popleft()
            self.posted[op] = comm.irecv(self.like(op), self.axis, rank)

    def take(self, op: Op) -> torch.Tensor:
        """The input of `op`, after it has arrived; then the next receive from the same neighbour is posted."""
        if op in self.here:
            return self.here.pop(op)
        rank = self.source[op]
        while op not in self.posted:
            self._post(rank)
        with trace.span(f"wait {op}", kind="wait"):
            value = self.posted.pop(op).wait()
        self._post(rank)
        return value

    def give(self, op: Op, value: torch.Tensor) -> None:
        """Give the result of `op` to the operation that waits for it, on this rank or on another."""
        step = 1 if op.kind == "F" else -1
        there = Op("F" if op.kind == "F" else "I", op.stage + step, op.micro)
        rank = self.schedule.rank_of(there)
        if rank == self.axis.rank:
            self.here[there] = value
            return
        line = self.leaving[there.kind, there.stage]
        if len(line) == self.buffers:
            with trace.span(f"full {there}", kind="wait"):
                line.popleft().wait()  # it will be read: the schedule was checked with these buffers
        line.append(comm.isend(value, self.axis, rank))

    def finish(self) -> None:
        """Wait until every message was sent."""
        for line in self.leaving.values():
            for handle in line:
                handle.wait()
