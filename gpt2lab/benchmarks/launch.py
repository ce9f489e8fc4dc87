"""How long live ranks take: the first launch (the forkserver starts), warm launches, and calls of a running pool."""

import json
import statistics
import time

import torch

from ..processes.launch import Ranks, launch
from ..ranks import comm
from ..ranks.mesh import Axis

QUICK = "--ranks 2 4"  # with --all --quick


def add_arguments(parser) -> None:
    """The options of the benchmark."""
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks (default 2 4 8)"
    )
    parser.add_argument("--repeat", type=int, default=5, help="warm launches of each (default 5)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to a file")


def one_sum(rank: int, world_size: int) -> float:
    """What every launch does: one all-reduce of one number."""
    return comm.all_reduce(torch.ones(1), Axis("world", tuple(range(world_size)), rank)).item()


def timed(call) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(ranks: list[int], repeat: int) -> list[dict]:
    """One row for the first launch, then for each number of ranks the medians of warm launches and pool calls."""
    rows = [
        {"what": f"first launch, {ranks[0]} ranks", "seconds": timed(lambda: launch(one_sum, ranks=ranks[0]))}
    ]
    for n in ranks:
        warm = [timed(lambda n=n: launch(one_sum, ranks=n)) for _ in range(repeat)]
        rows.append({"what": f"warm launch, {n} ranks", "seconds": statistics.median(warm)})
        with Ranks(n) as pool:
            pool.run(one_sum)
            calls = [timed(lambda pool=pool: pool.run(one_sum)) for _ in range(repeat)]
        rows.append({"what": f"call of a running pool, {n} ranks", "seconds": statistics.median(calls)})
    return rows


def run(args) -> dict[str, float]:
    """Print the table; every call does one all-reduce."""
    rows = measure(args.ranks, args.repeat)
    for row in rows:
        print(f"{row['what']:36}{row['seconds'] * 1e3:9.1f} ms (measured)")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=2)
    return {row["what"]: row["seconds"] for row in rows}
