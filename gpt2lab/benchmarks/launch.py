"""How long live ranks take: the first launch (the forkserver starts), warm launches, and calls of a running pool.

Every call does one all-reduce of one number.
"""

import torch

from ..processes.launch import Ranks, launch
from ..ranks import comm
from ..ranks.mesh import Axis
from . import race
from .race import Contest, Heat


def run(args) -> dict[str, float]:
    """Print the table; every call does one all-reduce."""
    first = {"first launch": lambda: launch(one_sum, ranks=args.ranks[0])}
    seconds = race.run([Heat(f"{{}}, {args.ranks[0]} ranks", Contest(first))], rounds=1, warm_up=0)
    for n in args.ranks:
        launched = {"warm launch": lambda n=n: launch(one_sum, ranks=n)}
        seconds |= race.run([Heat(f"{{}}, {n} ranks", Contest(launched))], args.rounds, warm_up=0)
        with Ranks(n) as pool:
            called = {"call of a running pool": lambda pool=pool: pool.run(one_sum)}
            seconds |= race.run([Heat(f"{{}}, {n} ranks", Contest(called))], args.rounds, warm_up=1)
    return seconds


def one_sum(rank: int, world_size: int) -> float:
    """What every launch does: one all-reduce of one number."""
    return comm.all_reduce(torch.ones(1), Axis("world", tuple(range(world_size)), rank)).item()
