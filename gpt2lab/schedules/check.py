"""Whether a schedule is right: complete, free of deadlock, within its buffers and within its memory."""

from collections import Counter

from ..machine.arguments import checked
from .schedule import KINDS, Op, Schedule


class ScheduleError(ValueError):
    """A schedule that leaves work out, deadlocks, or holds more than it promised."""


@checked(buffers=0)
def check(schedule: Schedule, buffers: int | None = None, promise: tuple[int, ...] | None = None) -> Schedule:
    """Return the schedule if it is right, else raise ScheduleError that says what is wrong and where.

    `buffers` bounds how many results of one stage may wait until the next stage reads them (None: any number; 0: the
    sender waits for its reader, as with blocking sends). `promise` overrides the schedule's own.
    """
    _complete(schedule)
    _finishes(schedule, buffers)
    for rank, most in enumerate(schedule.promise if promise is None else promise):
        if schedule.peak(rank) > most:
            raise ScheduleError(
                f"rank {rank} holds {schedule.peak(rank)} activations at its peak, but {most} were promised. "
                "Run a backward (or its weight gradient) earlier, or promise more."
            )
    return schedule


def _complete(schedule: Schedule) -> None:
    """Every micro-batch passes each stage of its route once forward and once backward, on the stage's rank."""
    seen = Counter(op for order in schedule.orders for op in order)
    for rank, order in enumerate(schedule.orders):
        for op in order:
            _belongs(schedule, op, rank)
    for op, times in seen.items():
        if times > 1:
            raise ScheduleError(f"{op} runs {times} times. Keep one of them.")
    for micro in range(schedule.units):
        for stage in schedule.route(micro):
            forward, whole, inputs, weights = (seen[Op(kind, stage, micro)] for kind in "FBIW")
            if not forward or (whole, inputs, weights) not in ((1, 0, 0), (0, 1, 1)):
                raise ScheduleError(
                    f"stage {stage} runs micro-batch {micro} with F={forward} B={whole} I={inputs} W={weights}. "
                    "It needs one F and then either one B, or one I and one W."
                )


def _belongs(schedule: Schedule, op: Op, rank: int) -> None:
    """Raise ScheduleError for an operation that no rank, or another rank, should run."""
    if op.kind not in KINDS:
        raise ScheduleError(f"{op} has an unknown kind. Use F, B, I or W.")
    if not 0 <= op.stage < len(schedule.placement) or not 0 <= op.micro < schedule.units:
        raise ScheduleError(
            f"{op} names stage {op.stage} of {len(schedule.placement)} and micro-batch {op.micro} of "
            f"{schedule.units}; both count from 0."
        )
    if (home := schedule.rank_of(op)) != rank:
        raise ScheduleError(f"{op} runs on rank {rank}, but stage {op.stage} is on rank {home}. Move it.")
    if op.stage not in schedule.route(op.micro):
        raise ScheduleError(f"{op}: micro-batch {op.micro} does not pass stage {op.stage}. Remove it.")


def _finishes(schedule: Schedule, buffers: int | None) -> None:
    """Run every rank as far as possible; ranks that cannot finish are in a deadlock."""
    run = _Run(schedule, buffers)
    awake = list(range(schedule.ranks))
    while awake:
        awake += run.advance(awake.pop())
    left = any(n < len(order) for n, order in zip(run.at, schedule.orders, strict=True))
    if left or any(run.sending):
        raise ScheduleError(stuck(schedule, run.at, run.done, run.sending))


class _Run:
    """A run of a schedule without a clock: the next operation of each rank, and the messages not yet read."""

    def __init__(self, schedule: Schedule, buffers: int | None):
        self.schedule, self.buffers = schedule, buffers
        self.done: set[Op] = set()
        self.at = [0] * schedule.ranks
        self.unread: Counter = Counter()  # messages not yet read, by (kind, sending stage)
        self.sending: list[Op | None] = [None] * schedule.ranks  # a result that has no free buffer
        self.waiting: dict = {}  # what ranks wait for -> those ranks

    def advance(self, rank: int) -> list[int]:
        """Run one rank as far as possible; returns the ranks that can continue now."""
        schedule, order, awake = self.schedule, self.schedule.orders[rank], []
        while True:
            op = self.sending[rank]
            if op is not None:
                if not self._may_send(op, rank):
                    return awake
                self.sending[rank] = None
                self.unread[_edge(op)] += 1
                awake += self._finish(op)
            if self.at[rank] == len(order):
                return awake
            op = order[self.at[rank]]
            if self.buffers == 0:
                awake += self.waiting.pop(("reader", _key(op)), [])
            missing = next((need for need in schedule.needs(op) if need not in self.done), None)
            if missing is not None:
                self.waiting.setdefault(missing, []).append(rank)
                return awake
            self.at[rank] += 1
            for need in schedule.needs(op):
                if schedule.rank_of(need) != rank:
                    self.unread[_edge(need)] -= 1
                    awake += self.waiting.pop(_edge(need), [])
            if schedule.message(op) is None:
                awake += self._finish(op)
            else:
                self.sending[rank] = op

    def _finish(self, op: Op) -> list[int]:
        self.done.add(_key(op))
        return self.waiting.pop(_key(op), [])

    def _may_send(self, op: Op, rank: int) -> bool:
        """Whether there is a free buffer; without buffers, whether the reader's next operation needs this message."""
        if self.buffers is None or self.unread[_edge(op)] < self.buffers:
            return True
        if self.buffers:
            self.waiting.setdefault(_edge(op), []).append(rank)
            return False
        there = self.schedule.message(op)
        reader = self.schedule.rank_of(there)
        order = self.schedule.orders[reader]
        ready = self.sending[reader] is None and self.at[reader] < len(order)
        if ready and _key(order[self.at[reader]]) == there:
            return True
        self.waiting.setdefault(("reader", there), []).append(rank)
        return False


def _edge(op: Op) -> tuple[str, int]:
    return ("F" if op.kind == "F" else "I", op.stage)


def _key(op: Op) -> Op:
    return op._replace(kind="I") if op.kind == "B" else op


def stuck(schedule: Schedule, at: list[int], done: set[Op], stalled: list[Op | None] | None = None) -> str:
    """One sentence that says what each rank waits for."""
    lines = []
    for rank, order in enumerate(schedule.orders):
        if stalled and stalled[rank] is not None:
            lines.append(f"rank {rank} cannot send {stalled[rank]} (no free buffer)")
        elif at[rank] < len(order):
            op = order[at[rank]]
            need = next((need for need in schedule.needs(op) if need not in done), None)
            lines.append(f"rank {rank} waits at {op} for {need}")
    return "Deadlock: " + ", ".join(lines) + ". Run what is waited for earlier, or allow more buffers."
