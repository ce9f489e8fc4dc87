"""Shared memory compared with gloo on the same ranks: all-reduce, reduce-scatter, all-gather from 1 KB to 64 MB.

Both take turns, so that other load on the machine affects both. A time is that of one call in a row of calls, as in a
training step; medians count. The last lines say what limits the largest size: how many bytes its copies and sums read
and write, and how fast a plain copy does that.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from .. import transport
from ..machine.speed import copy_rate
from ..processes.launch import Ranks

CALLS = ("all_reduce", "reduce_scatter", "all_gather")
BACKENDS = (transport.NAME, "gloo") if transport.AVAILABLE else ("gloo",)
SIZES = [1 << bits for bits in (10, 14, 17, 20, 23, 26)]  # 1 KB to 64 MB


QUICK = "--ranks 2 --sizes 1024 131072 1048576 --trials 3"  # with --all --quick


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default 2 4)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes (default 1 KB to 64 MB)")
    parser.add_argument("--trials", type=int, default=9, help="rows of calls of each (default 9)")
    parser.add_argument("--out", default="runs/transport", help="folder for the figure and the JSON file")


def run(args: argparse.Namespace) -> dict[str, float]:
    """Print times and how many times faster shared memory is; save the figure and the numbers."""
    from ..plots.collectives import transports_figure

    if not transport.AVAILABLE:
        print("This system has no semaphores in shared memory: its ranks talk through gloo.")
        return {}
    rows = []
    print("one call, both backends on the same ranks in turns, float32 (measured); times in ms")
    print(f"{'ranks':>5} {'bytes':>9}  call              shm     gloo   shm is faster by")
    for n in args.ranks:
        with Ranks(n, timeout=120, echo=False, backend=transport.NAME) as pool:
            for size in args.sizes:
                found = pool.run(measure, size, args.trials)[0]
                rows += [{"ranks": n, "bytes": size, "call": c, "seconds": found[c]} for c in CALLS]
                for call in CALLS:
                    ours, theirs = (1e3 * found[call][name] for name in BACKENDS)
                    print(
                        f"{n:5} {size:9}  {call:14}{ours:8.3f} {theirs:8.3f} {theirs / ours:8.1f} x",
                        flush=True,
                    )
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
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "transport.json").write_text(json.dumps(rows, indent=1))
    transports_figure(rows).savefig(folder / "transport.png", dpi=120)
    print(f"Saved {folder / 'transport.png'} and {folder / 'transport.json'}")
    return {
        f"{row['call']}, {row['ranks']} ranks, {row['bytes'] >> 10} KiB, {name}": seconds
        for row in rows
        for name, seconds in row["seconds"].items()
    }


def touched(call: str, ranks: int) -> float:
    """How often a rank reads or writes the bytes of the whole tensor in a large call of `transport.moves`.

    A copy reads and writes once each, a sum of two reads twice and writes once.
    """
    n, copy, combine = ranks, 2, 3
    if call == "all_reduce" and n == 2:
        return copy + combine  # into the own slot; with the other's
    others, own = (n - 1) / n, 1 / n
    return {
        "all_reduce": others * (copy + combine + copy)
        + own * copy,  # into the slot, summed; the own part given, all taken
        "reduce_scatter": own * copy + others * (copy + combine),
        "all_gather": own * 2 * copy + others * copy,  # the own part to its place and into the slot
    }[call]


def measure(rank: int, world_size: int, size: int, trials: int) -> dict[str, dict[str, float]]:
    """Median seconds of one call, by call and backend; `size` is that of the whole tensor."""
    x = torch.ones(size // 4 // world_size * world_size)
    part = torch.empty(x.numel() // world_size)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    work = {
        "all_reduce": lambda group: group.allreduce([x], _at_once(dist.AllreduceOptions())),
        "reduce_scatter": lambda group: group.reduce_scatter_single(
            part, x, _at_once(dist.ReduceScatterOptions())
        ),
        "all_gather": lambda group: group.all_gather_single(x, part, _at_once(AllgatherOptions())),
    }
    times = {call: {name: [] for name in BACKENDS} for call in CALLS}
    row = max(1, min(20, (1 << 22) // size))
    for trial in range(trials + 1):
        for call, name in [(call, name) for call in CALLS for name in BACKENDS]:
            x.fill_(1.0), part.fill_(1.0)
            groups[name].barrier().wait()
            start = time.perf_counter()
            for _ in range(row):
                work[call](groups[name]).wait()
            if trial:  # the first is for warming up
                times[call][name].append((time.perf_counter() - start) / row)
    for group in groups.values():
        dist.destroy_process_group(group)
    return {call: {name: statistics.median(t) for name, t in found.items()} for call, found in times.items()}


def _at_once(options):
    """Options of a call that is waited for at once, as the calls of torch.distributed make them without async_op."""
    options.asyncOp = False
    return options
