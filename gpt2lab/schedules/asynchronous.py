"""Asynchronous pipelines: 1F1B's order without a flush, and which version of the weights each operation reads.

A batch is `per_update` micro-batches in a row. When the last backward of batch t has run on a stage, the stage
updates its own weights and they become version t + 1; it does not wait for the other stages. The schemes run the same
operations in the same order and differ only in the table.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from .check import ScheduleError, check
from .gpipe_1f1b import alternate, one_forward_one_backward
from .schedule import Op, Schedule, require


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

    @property
    def updates(self) -> int:
        """How many batches run through, and so how often each stage updates."""
        return self.schedule.micros // self.per_update

    def batch(self, op: Op) -> int:
        """The batch that an operation works for."""
        return op.micro // self.per_update

    def makes(self, op: Op) -> int | None:
        """The version that the stage makes right after `op`; None where it does not update."""
        last = op.kind == "B" and (op.micro + 1) % self.per_update == 0
        return self.batch(op) + 1 if last else None

    def staleness(self, op: Op) -> int:
        """How many updates the weights read lack: zero where they contain all batches before the operation's own."""
        return self.batch(op) - self.reads[op]

    def held(self, stage: int) -> list[frozenset[int]]:
        """The versions that a stage must have after each operation: its newest, and those still to be read."""
        order = self.schedule.orders[stage]
        last = {self.reads[op]: n for n, op in enumerate(order)}
        alive, sets = {0}, []
        for n, op in enumerate(order):
            newest = self.makes(op) or max(alive)
            alive = {v for v in alive | {newest} if v == newest or last.get(v, -1) > n}
            sets.append(frozenset(alive))
        return sets


def free_running(ranks: int, micros: int, active: int | None = None) -> Schedule:
    """1F1B's order over a stream of micro-batches: one warm-up at the start, one drain at the end.

    `active` (default p) bounds how many micro-batches are between their first forward and their last backward
    (AMPNet's max_active_keys, PipeDream's NOAM). Bubble (p - 1) / (m + p - 1), which goes to zero.
    """
    require(ranks, micros)
    active = active or ranks
    if not 1 <= active <= ranks:
        raise ValueError(
            f"active={active} micro-batches in progress: more than pp={ranks} would only wait. Use active=1 to {ranks}."
        )
    return alternate(ranks, micros, active, "free_running")


def flushed(ranks: int, batches: int, per_update: int) -> Schedule:
    """1F1B batch after batch: the next one's first forward waits for the last backward (PipeDream-Flush)."""
    one = one_forward_one_backward(ranks, per_update)
    orders = tuple(
        tuple(op._replace(micro=b * per_update + op.micro) for b in range(batches) for op in order)
        for order in one.orders
    )
    return replace(one, orders=orders, micros=batches * per_update, name="flushed")


def versions_held(name: str, p: int, stage: int, per_update: int = 1, active: int | None = None) -> int:
    """The most versions of its weights that a stage of p holds at a time, in a stream long enough.

    PipeDream: p - s with one micro-batch an update, its published number; with k of them 1 + ceil((p - 1 - s) / k).
    """
    ahead = min(p, active or p) - 1  # forwards that the first stage is ahead of its backwards
    if name == "2bw":
        return 2
    if name in ("pipedream", "pipedream_vertical"):
        lag = ahead if name == "pipedream_vertical" else min(ahead, p - 1 - stage)
        return 1 + -(-lag // per_update)
    return 1


def make_stream(
    name: str, ranks: int, batches: int, per_update: int = 1, active: int | None = None
) -> Stream:
    """The stream of a scheme of `SCHEMES` over `batches` batches, checked.

    Raises ValueError where the scheme cannot run so, as 2BW with fewer micro-batches in a batch than stages.
    """
    require(ranks, batches, per_update=per_update)
    if name not in SCHEMES:
        raise ValueError(f"There is no asynchronous schedule {name!r}. There are {', '.join(SCHEMES)}.")
    if name == "2bw" and per_update < ranks:
        raise ValueError(
            f"schedule=2bw makes an update of at least pp={ranks} micro-batches, and here are {per_update}: a batch "
            f"would need weights that are not there yet. Use micro={ranks} or more."
        )
    if name == "1f1b":
        schedule = flushed(ranks, batches, per_update)
    else:
        schedule = free_running(ranks, batches * per_update, active)
    schedule = replace(schedule, name=name)
    version, newest = {}, [0] * ranks  # the newest version of its stage when each operation starts
    for stage, order in enumerate(schedule.orders):
        for op in order:
            version[op] = newest[stage]
            newest[stage] += op.kind == "B" and (op.micro + 1) % per_update == 0
    reads = {op: SCHEMES[name](version, op, per_update) for op in version}
    at_entry = lambda op: reads[op] if name == "2bw" else version[Op("F", 0, op.micro)]
    tied = {op: at_entry(op) for op in schedule.orders[-1]}
    return check_stream(Stream(schedule, per_update, reads, tied))


def _newest(version, op, per_update):
    """AMPNet (Gaunt et al. 2017): no old version is kept, a backward reads newer weights than its forward."""
    return version[op]


def _stashed(version, op, per_update):
    """PipeDream (Narayanan et al. 2019): a backward reads what its forward read on the same stage."""
    return version[op._replace(kind="F")]


def _vertical(version, op, per_update):
    """PipeDream with vertical sync: all stages read the version that the first one read."""
    return version[Op("F", 0, op.micro)]


def _double_buffered(version, op, per_update):
    """PipeDream-2BW (Narayanan et al. 2021): the whole batch t reads version t - 1."""
    return max(0, op.micro // per_update - 1)


SCHEMES: dict[str, Callable] = {
    "1f1b": _stashed,
    "ampnet": _newest,
    "pipedream": _stashed,
    "pipedream_vertical": _vertical,
    "2bw": _double_buffered,
}
FREE = tuple(name for name in SCHEMES if name != "1f1b")  # those without a flush


def check_stream(stream: Stream) -> Stream:
    """Return the stream if it is right: dependencies, no deadlock, and no operation reads a version not yet made."""
    schedule = check(stream.schedule)
    newest = [0] * schedule.ranks
    at_entry = {}  # the newest embedding when each micro-batch entered
    for stage, order in enumerate(schedule.orders):
        for op in order:
            _exists(op, stream.reads[op], newest[stage], "of its stage")
            if op.kind == "F" and stage == 0:
                at_entry[op.micro] = newest[0]
            newest[stage] = stream.makes(op) or newest[stage]
    for op in schedule.orders[-1]:
        _exists(op, stream.tied[op], at_entry[op.micro], "of the embedding")
    return stream


def _exists(op: Op, version: int, newest: int, whose: str) -> None:
    if not 0 <= version <= newest:
        raise ScheduleError(
            f"{op} reads version {version} {whose}, and the newest that is sure to be there is {newest}. "
            "Read an older one, or run the update earlier."
        )
