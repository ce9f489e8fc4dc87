"""Shared memory compared with gloo on the same ranks: all-reduce, reduce-scatter, all-gather from 1 KB to 64 MB.

A time is that of one call in a row of calls, as in a training step. The rate is that of the bytes which shared memory's
copies and sums read and write on all ranks together; the last lines say how fast a plain copy does that.
"""

import os
from argparse import Namespace
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
    """Print times, ratios and rates, and how fast a copy is; save the figure and the numbers."""
    from ..plots.collectives import transports_figure

    if not transport.AVAILABLE:
        print("This system has no semaphores in shared memory: its ranks talk through gloo.")
        return {}
    sizes, seconds, rows = list(race.each(args, "ranks", "sizes", call=CALLS)), {}, []
    for one in sizes:
        label = f"{one.call}, {one.ranks} ranks, {one.sizes >> 10} KiB, {{}}"
        work = one.ranks * touched(one.call, one.ranks) * one.sizes / 1e9, "GB/s in memory"
        heat = Heat(label, contest, one, one.ranks, {transport.NAME: ("gloo",)}, {transport.NAME: work})
        found = race.run([heat], args.rounds, warm_up=1)
        times = dict(zip(BACKENDS, found.values(), strict=True))
        rows.append({"ranks": one.ranks, "bytes": one.sizes, "call": one.call, "seconds": times})
        seconds |= found
    torch.set_num_threads(os.cpu_count() or 1)
    for n in args.ranks:
        rate = copy_rate(n * max(args.sizes), seconds=0.3)
        print(f"a copy in as much memory as the largest tensors of {n} ranks: {rate / 1e9:.3g} GB/s")
    race.save_race(args.out, "transport", rows, transports_figure(rows))
    return seconds


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
        spans, _ = race.on_rank(rank, world_size, contest, Namespace(call=call, sizes=size), trials, 1)
        found[call] = {backend: alone(of_backend).median for backend, of_backend in spans.items()}
    return found


def contest(rank: int, world_size: int, args) -> Contest:
    """A call with a tensor of so many bytes over each backend."""
    x = torch.ones(args.sizes // 4 // world_size * world_size)
    part = torch.empty(x.numel() // world_size)
    work = {
        "all_reduce": lambda group: group.allreduce([x], _at_once(dist.AllreduceOptions())),
        "reduce_scatter": lambda group: group.reduce_scatter_single(
            part, x, _at_once(dist.ReduceScatterOptions())
        ),
        "all_gather": lambda group: group.all_gather_single(x, part, _at_once(AllgatherOptions())),
    }[args.call]
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    ways = {name: partial(lambda group: work(group).wait(), group) for name, group in groups.items()}
    calls = max(1, min(20, (1 << 22) // args.sizes))
    return Contest(ways, lambda _: (x.fill_(1.0), part.fill_(1.0)), calls=calls)


def _at_once(options):
    """Options of a call that is waited for at once, as the calls of torch.distributed make them without async_op."""
    options.asyncOp = False
    return options
