"""A schedule is played: every rank runs its operations in order, each as soon as it can.

`check` asks whether all ranks come to their ends, within buffers and memory; `simulate` asks when.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache

from ..machine.arguments import checked
from ..machine.patience import patiently
from .schedule import KINDS, Op, Schedule
from .timeline import Cost, TimedOp, Timeline, exact_ratio


class ScheduleError(ValueError):
    """A schedule that leaves work out, deadlocks, or holds more than it promised."""


@checked(buffers=0)
def check(schedule: Schedule, buffers: int | None = None, promise: tuple[int, ...] | None = None) -> Schedule:
    """Return the schedule if it is right, else raise ScheduleError that says what is wrong and where.

    `buffers` bounds how many results of one stage may wait until the next stage reads them (None: any number; 0: the
    sender waits for its reader, as with blocking sends). `promise` overrides the schedule's own.
    """
    _complete(schedule)
    Player(schedule, buffers=buffers).run()
    for rank, most in enumerate(schedule.promise if promise is None else promise):
        if schedule.peak(rank) > most:
            raise ScheduleError(
                f"rank {rank} holds {schedule.peak(rank)} activations at its peak, but {most} were promised. "
                "Run a backward (or its weight gradient) earlier, or promise more."
            )
    return schedule


@checked()
def simulate(schedule: Schedule, cost: Cost | None = None) -> Timeline:
    """Run the schedule on a clock: an operation starts when its rank is free and what it needs has arrived.

    Raises ScheduleError where the order can never finish.
    """
    cost = cost or Cost()
    return Timeline(schedule, Player(schedule, cost).run(), cost)


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


class Player:
    """Where every rank is in its order, what is done and when, what has not been read, and who waits for what.

    An operation starts when its rank is free and all of `needs(op)` are done (by default `schedule.needs`); a result
    of another rank arrives `cost.hop` later. With `buffers` a rank cannot go on before its result has a free one.
    """

    def __init__(
        self,
        schedule: Schedule,
        cost: Cost | None = None,
        buffers: int | None = None,
        needs: Callable[[Op], Iterable[Op]] | None = None,
    ):
        self.schedule, self.cost, self.buffers = schedule, cost or Cost(), buffers
        self.needs = needs or schedule.needs
        self.rows: list[list[TimedOp]] = [[] for _ in schedule.orders]  # what each rank has run
        self.free = [0] * schedule.ranks  # when each rank is free again
        self.done: dict[Op, tuple] = {}  # operation, a backward always as I -> (its end, its rank)
        self.unread: Counter = Counter()  # messages not yet read, by (kind, sending stage)
        self.sending: list[Op | None] = [None] * schedule.ranks  # a result that has no free buffer
        self.asleep: dict = {}  # what ranks wait for -> those ranks
        self.alone: set[Op] = set()  # forwards that cannot be one block with the backward after them
        self._time = cache(lambda kind, stage, unit: self.cost.time(kind, schedule.position(stage), unit))

    def run(self) -> tuple[tuple[TimedOp, ...], ...]:
        """Play all ranks to their ends; returns their rows, or raises ScheduleError: what each rank waits for."""
        for _ in patiently(self._played(), "operations of a schedule", sum(map(len, self.schedule.orders))):
            pass
        if stuck := [line for rank in range(self.schedule.ranks) if (line := self._stuck(rank))]:
            raise ScheduleError(
                f"Deadlock: {', '.join(stuck)}. Run what is waited for earlier, or allow more buffers."
            )
        return tuple(map(tuple, self.rows))

    def _played(self) -> Iterator[int]:
        """Run whichever rank can go on, until none can; yields once for each operation that has run."""
        awake = list(range(self.schedule.ranks))
        while awake:
            rank = awake.pop()
            before = len(self.rows[rank])
            awake += self.advance(rank)
            yield from range(before, len(self.rows[rank]))
            awake = awake or self.part_blocks()

    def advance(self, rank: int) -> list[int]:
        """Run one rank until it must wait; returns the ranks that may continue now."""
        woken: list[int] = []
        while self._sent(rank, woken) and (block := self.block(rank)):
            if self.buffers == 0:
                woken += self.asleep.pop(("reader", _key(block[0])), ())
            start, needs = self.free[rank], [need for op in block for need in self.needs(op)]
            for need in needs:
                if need not in self.done:
                    self.asleep.setdefault(need, []).append(rank)
                    return woken
                end, home = self.done[need]
                start = max(start, end if home == rank else end + self.cost.hop)
            end = self._place(rank, block, start)
            sends = self.cost.blocking and any(map(self.schedule.message, block))
            self.free[rank] = end + self.cost.hop if sends else end
            if self.buffers is None:
                for op in block:
                    self._finish(op, end, rank, woken)
                continue
            for need in needs:
                if self.done[need][1] != rank:
                    self.unread[_edge(need)] -= 1
                    woken += self.asleep.pop(_edge(need), ())
            if self.schedule.message(block[0]) is None:
                self._finish(block[0], end, rank, woken)
            else:
                self.sending[rank] = block[0]
        return woken

    def _finish(self, op: Op, end, rank: int, woken: list[int]) -> None:
        self.done[_key(op)] = end, rank
        woken += self.asleep.pop(_key(op), ())

    def _sent(self, rank: int, woken: list[int]) -> bool:
        """Whether the rank's last result is on its way, so that the rank may go on."""
        op = self.sending[rank]
        if op is not None:
            if not self._may_send(op, rank):
                return False
            self.sending[rank] = None
            self.unread[_edge(op)] += 1
            self._finish(op, self.free[rank], rank, woken)
        return True

    def _may_send(self, op: Op, rank: int) -> bool:
        """Whether there is a free buffer; without buffers, whether the reader's next operation needs this message."""
        if self.unread[_edge(op)] < self.buffers:
            return True
        event = _edge(op)
        if self.buffers == 0:
            there = self.schedule.message(op)
            reader = self.schedule.rank_of(there)
            following = self.block(reader) if self.sending[reader] is None else ()
            if following and _key(following[0]) == there:
                return True
            event = "reader", there
        self.asleep.setdefault(event, []).append(rank)
        return False

    def block(self, rank: int) -> tuple[Op, ...]:
        """The rank's next operation, or its next two where they run as one; none at its end."""
        order, n = self.schedule.orders[rank], len(self.rows[rank])
        if self.cost.joint is not None and n + 1 < len(order) and order[n].kind == "F":
            after = order[n + 1]
            if after.kind == "B" and after.stage != order[n].stage and order[n] not in self.alone:
                return order[n : n + 2]
        return order[n : n + 1]

    def part_blocks(self) -> list[int]:
        """Where all wait: the ranks whose block's backward waits for its own forward now run that forward alone."""
        waits = {rank: found for rank in range(self.schedule.ranks) if (found := self.missing(rank))}
        after = {rank: self.schedule.rank_of(need) for rank, (_, need) in waits.items()}
        parted = []
        for rank, (op, _) in waits.items():
            at = after[rank]
            for _ in after:
                at = at if at == rank else after.get(at)
            if at == rank and op != (first := self.block(rank)[0]):
                self.alone.add(first)
                parted.append(rank)
        return parted

    def missing(self, rank: int) -> tuple[Op, Op] | None:
        """At which operation a rank waits, and for which other one; None where nothing is missing."""
        pairs = ((op, need) for op in self.block(rank) for need in self.needs(op))
        return next(((op, need) for op, need in pairs if need not in self.done), None)

    def _stuck(self, rank: int) -> str | None:
        """What a rank waits for; None if it is at its end."""
        if self.sending[rank] is not None:
            return f"rank {rank} cannot send {self.sending[rank]} (no free buffer)"
        missing = self.missing(rank)
        return missing and "rank {} waits at {} for {}".format(rank, *missing)

    def _place(self, rank: int, block: tuple[Op, ...], start):
        """Put a block on the clock and return its end."""
        row, period = self.rows[rank], len(self.cost.factors)
        times = [self._time(op.kind, op.stage, op.micro % period) for op in block]
        total = times[0] if len(block) == 1 else self.cost.joint
        middle = start + (total if len(block) == 1 else exact_ratio(total * times[0], sum(times)))
        row.append(TimedOp(block[0], start, middle))
        if len(block) == 2:
            row.append(TimedOp(block[1], middle, start + total))
        return start + total


def _edge(op: Op) -> tuple[str, int]:
    return ("F" if op.kind == "F" else "I", op.stage)


def _key(op: Op) -> Op:
    return Op("I", op.stage, op.micro) if op.kind == "B" else op
