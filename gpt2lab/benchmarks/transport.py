"""Shared memory compared with gloo on the same ranks: all-reduce, reduce-scatter, all-gather from 1 KB to 64 MB.

Both take turns, so that other load on the machine affects both. A time is that of one call in a row of calls, as in a
training step; medians count. The last lines say what limits the largest size: how many bytes its copies and sums read
and write, and how fast a plain copy does that.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from .. import transport
from ..machine.speed import copy_rate
from ..machine.timing import alone
from . import race
from .race import Contest, Heat

CALLS = ("all_reduce", "reduce_scatter", "all_gather")
BACKENDS = (transport.NAME, "gloo") if transport.AVAILABLE else ("gloo",)


def run(args) -> dict[str, float]:
    """Print times and how many times as long shared memory takes; save the figure and the numbers."""
    from ..plots.collectives import transports_figure

    if not transport.AVAILABLE:
        print("This system has no semaphores in shared memory: its ranks talk through gloo.")
        return {}
    print("one call, both backends on the same ranks in turns, float32 (measured)")
    seconds, rows = race.run(heats(args), args.rounds, warm_up=1), []
    for heat in heats(args):
        found = {name: seconds[heat.label.format(name)] for name in BACKENDS}
        rows.append({"ranks": heat.ranks, "bytes": heat.given[1], "call": heat.given[0], "seconds": found})
    largest = max(args.sizes)
    torch.set_num_threads(os.cpu_count() or 1)
    print("what shared memory's copies and sums read and write in a call, on all ranks together")
    for row in (row for row in rows if row["bytes"] == largest):
        moved = row["ranks"] * touched(row["call"], row["ranks"]) * largest
        rate, copy = moved / row["seconds"][transport.NAME], copy_rate(row["ranks"] * largest, seconds=0.3)
        print(
            f"{row['ranks']:5} {largest:9}  {row['call']:14}{moved / 1e6:8.0f} MB at {rate / 1e9:.0f} GB/s; "
            f"a copy in as much memory as the tensors: {copy / 1e9:.0f} GB/s"
        )
    race.save_race(args.out, "transport", rows, transports_figure(rows))
    return seconds


def heats(args):
    """A heat for each number of ranks, size and call."""
    for n in args.ranks:
        for size in args.sizes:
            for call in CALLS:
                yield Heat(f"{call}, {n} ranks, {size >> 10} KiB, {{}}", contest, (call, size), n, ("gloo",))


def touched(call: str, ranks: int) -> float:
    """How often a rank reads or writes the bytes of the whole tensor in a large call of `transport.moves`.

    A copy reads and writes once each, a sum of two reads twice and writes once.
    """
    n, copy, combine = ranks, 2, 3
    if call == "all_reduce" and n == 2:
        return copy + combine  # into the own slot; with the other's
    others, own = (n - 1) / n, 1 / n
    return {
        # into the slot, summed; the own part given, all taken
        "all_reduce": others * (copy + combine + copy) + own * copy,
        "reduce_scatter": own * copy + others * (copy + combine),
        "all_gather": own * 2 * copy + others * copy,  # the own part to its place and into the slot
    }[call]


def measure(rank: int, world_size: int, size: int, trials: int) -> dict[str, dict[str, float]]:
    """Median seconds of one call, by call and backend; `size` is that of the whole tensor."""
    found = {}
    for call in CALLS:
        spans, *_ = race.on_rank(rank, world_size, contest, (call, size), trials, 1)
        found[call] = {backend: alone(of_backend).median for backend, of_backend in spans.items()}
    return found


def contest(rank: int, world_size: int, call: str, size: int) -> Contest:
    """A call with a tensor of so many bytes over each backend."""
    x = torch.ones(size // 4 // world_size * world_size)
    part = torch.empty(x.numel() // world_size)
    work = {
        "all_reduce": lambda group: group.allreduce([x], _at_once(dist.AllreduceOptions())),
        "reduce_scatter": lambda group: group.reduce_scatter_single(
            part, x, _at_once(dist.ReduceScatterOptions())
        ),
        "all_gather": lambda group: group.all_gather_single(x, part, _at_once(AllgatherOptions())),
    }[call]
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    ways = {name: partial(lambda group: work(group).wait(), group) for name, group in groups.items()}
    return Contest(ways, lambda _: (x.fill_(1.0), part.fill_(1.0)), calls=max(1, min(20, (1 << 22) // size)))


def _at_once(options):
    """Options of a call that is waited for at once, as the calls of torch.distributed make them without async_op."""
    options.asyncOp = False
    return options
