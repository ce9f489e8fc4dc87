"""Asynchronous pipelines: 1F1B's order without a flush, and which version of the weights each operation reads.

A batch is `per_update` micro-batches in a row. When the last backward of batch t has run on a stage, the stage
updates its own weights and they become version t + 1; it does not wait for the other stages. The schemes run the same
operations in the same order and differ only in the table.

A stage on several ranks deals the batches to them in turn; when each of its replicas has run one, they add up their
gradients and make the same update: a version for each round.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral

from ..machine.arguments import checked
from .gpipe_1f1b import alternate, one_forward_one_backward
from .play import Player, check
from .schedule import Op, Schedule, require


@checked(per_update=1, stage=0, rank=0, batches=1)
@dataclass(frozen=True)
class Stream:
    """A schedule of many batches with its version table.

    `reads[op]` is the version of its stage's weights that an operation reads. `tied[op]` is the version of the token
    embedding that the last stage's head reads: the first stage owns that weight and makes its versions. The last
    stage runs each backward right after its forward, so it needs one version of it at a time.
    """

    schedule: Schedule
    per_update: int
    reads: dict[Op, int]
    tied: dict[Op, int]

    def batch(self, op: Op) -> int:
        """The batch that an operation works for."""
        return op.micro // self.per_update

    def update(self, op: Op) -> int:
        """The update of its stage, from 0, to which an operation contributes."""
        return self.batch(op) // len(self.schedule.ranks_of(op.stage))

    def makes(self, op: Op) -> int | None:
        """The version that the rank makes right after `op`; None where it does not update."""
        turn = op.micro // len(self.schedule.ranks_of(op.stage)) + 1  # of this rank's micro-batches
        return self.update(op) + 1 if op.kind == "B" and turn % self.per_update == 0 else None

    def newest(self, stage: int, batches: int) -> int:
        """The version that a stage's updates by so many batches make."""
        return self.update(Op("B", stage, batches * self.per_update - 1)) + 1

    def staleness(self, op: Op) -> int:
        """How many updates the weights read lack: zero where they contain all batches before the operation's own."""
        return self.update(op) - self.reads[op]

    def held(self, rank: int) -> list[frozenset[int]]:
        """The versions that a rank must have after each operation: its newest, and those still to be read."""
        order = self.schedule.orders[rank]
        last = {self.reads[op]: n for n, op in enumerate(order)}
        alive, sets = {0}, []
        for n, op in enumerate(order):
            newest = self.makes(op) or max(alive)
            alive = {v for v in alive | {newest} if v == newest or last.get(v, -1) > n}
            sets.append(frozenset(alive))
        return sets


@checked(stages=(1, 100_000), micros=1, active=1)
def free_running(stages: int | tuple[int, ...], micros: int, active: int | None = None) -> Schedule:
    """1F1B's order over a stream of micro-batches: one warm-up at the start, one drain at the end.

    `stages` says how many there are, or how many ranks each has. `active` (default p) bounds how many micro-batches of
    a rank are between their first forward and their last backward (AMPNet's max_active_keys). A rank of the first
    stage has ceil(ranks / ranks of the first stage) of them, PipeDream's NOAM. Bubble of p stages on p ranks
    (p - 1) / (m + p - 1), which goes to zero.
    """
    replicas = (1,) * stages if isinstance(stages, Integral) else tuple(stages)
    ranks = sum(replicas)
    require(ranks, micros, ranks_of_a_stage=min(replicas, default=1))
    active = active or ranks
    if not 1 <= active <= ranks:
        raise ValueError(
            f"active={active} micro-batches in progress: more than pp={ranks} would only wait. Use active=1 to {ranks}."
        )
    return alternate(replicas, micros, active, "free_running")


@checked(ranks=(1, 100_000), batches=1, per_update=1)
def flushed(ranks: int, batches: int, per_update: int) -> Schedule:
    """1F1B batch after batch: the next one's first forward waits for the last backward (PipeDream-Flush)."""
    require(ranks, batches, per_update=per_update)
    one = one_forward_one_backward(ranks, per_update)
    orders = tuple(
        tuple(op._replace(micro=b * per_update + op.micro) for b in range(batches) for op in order)
        for order in one.orders
    )
    return replace(one, orders=orders, micros=batches * per_update, name="flushed")


@checked(stages=(1, 100_000), batches=1, per_update=1, active=1)
def make_stream(
    name: str, stages: int | tuple[int, ...], batches: int, per_update: int = 1, active: int | None = None
) -> Stream:
    """The stream of a scheme of `SCHEMES` over `batches` batches, checked; `stages` as in `free_running`.

    Raises ValueError where the scheme cannot run so, as 2BW with fewer micro-batches in a batch than stages.
    """
    stages = stages if isinstance(stages, Integral) else tuple(stages)
    ranks = sum(stages) if isinstance(stages, tuple) else stages
    require(ranks, batches, per_update=per_update)
    if name not in SCHEMES:
        raise ValueError(f"There is no asynchronous schedule {name!r}. There are {', '.join(SCHEMES)}.")
    if name == "2bw" and per_update < ranks:
        raise ValueError(
            f"schedule=2bw makes an update of at least pp={ranks} micro-batches, and here are {per_update}: a batch "
            f"would need weights that are not there yet. Use micro={ranks} or more."
        )
    if isinstance(stages, tuple):
        _check_rounds(name, stages, batches, per_update)
    if name == "1f1b":
        schedule = flushed(ranks, batches, per_update)
    else:
        schedule = free_running(stages, batches * per_update, active)
    stream = check_stream(Stream(replace(schedule, name=name), per_update, {}, {}))
    for order in schedule.orders:
        newest = 0
        for op in order:
            stream.reads[op] = _version_read(stream, op, newest)
            newest = stream.makes(op) or newest
    for op in (op for op in stream.reads if op.stage == schedule.depth - 1):
        stream.tied[op] = stream.reads[Op("F", 0, op.micro)]
    return stream


def _check_rounds(name: str, replicas: tuple[int, ...], batches: int, per_update: int) -> None:
    if max(replicas) > 1 and (per_update > 1 or name not in ("pipedream", "ampnet")):
        raise ValueError(
            f"A stage of schedule={name} with micro={per_update} cannot have replicas that take batches in turn. "
            "Use schedule=pipedream or ampnet with micro=1."
        )
    if uneven := [r for r in replicas if batches % r]:
        raise ValueError(
            f"{batches} batches make no whole rounds over {uneven[0]} replicas of a stage ({batches} % {uneven[0]} = "
            f"{batches % uneven[0]}). Use a multiple of {uneven[0]}."
        )


FREE = {  # without a flush, and where each is from
    # every operation reads the newest version, a backward a newer one than its forward
    "ampnet": "Gaunt et al. 2017",
    # weight stashing: a backward reads what its forward read on the same stage
    "pipedream": "Narayanan et al. 2019",
    # all stages read the version that the first one read
    "pipedream_vertical": "Narayanan et al. 2019, vertical sync",
    # double-buffered weights: the whole batch t reads version t - 1
    "2bw": "Narayanan et al. 2021",
}
SCHEMES = ("1f1b", *FREE)


def _version_read(stream: Stream, op: Op, newest: int) -> int:
    """The version that an operation reads in its scheme, where the newest of its rank is `newest`."""
    scheme = stream.schedule.name
    if scheme == "2bw":
        return max(0, stream.batch(op) - 1)
    if scheme == "pipedream_vertical":
        return stream.reads.get(Op("F", 0, op.micro), newest)  # rank 0, replayed first, has stage 0
    return newest if scheme == "ampnet" or op.kind == "F" else stream.reads[op._replace(kind="F")]


@checked()
def check_stream(stream: Stream) -> Stream:
    """Return the stream if its orders come to their ends, also where replicas wait for each other to update.

    Raises ScheduleError. Replicas add up their gradients: after an update a rank waits for its whole round's backwards.
    """
    schedule, rounds = check(stream.schedule), {}
    for order in schedule.orders if schedule.replicas else ():
        for op, following in pairwise(order):
            if stream.makes(op):
                r = len(schedule.ranks_of(op.stage))
                first = op.micro // r * r
                rounds[following] = [Op("I", op.stage, micro) for micro in range(first, first + r)]
    if rounds:
        Player(schedule, needs=lambda op: (*schedule.needs(op), *rounds.get(op, ()))).run()
    return stream
