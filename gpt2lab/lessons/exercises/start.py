"""Checkers of lesson 00: rows of a rank, the global mean, a sum over ranks, the bytes of an all-reduce."""

import numpy as np

from . import returned
from .differences import Most, listed, whole
from .engine import Task
from .guards import PACKAGE
from .ranked import ranked, sent

rows = Task(
    lambda count, world: [part.tolist() for part in np.array_split(np.arange(count), world)],
    shown=[(8, 2), (10, 4), (7, 2), (7, 3), (2, 3), (5, 1)],
    what="{} rows on {} ranks",
    closed=(PACKAGE,),
    drawn=lambda chance: (chance.randint(0, 40), chance.randint(1, 9)),
    call=lambda answer, count, world: [
        listed(list(returned(answer(rank, world, count)))) for rank in reversed(range(world))
    ][::-1],
    rules=whole,
)
"""Exercise: which rows of a batch a rank holds, uneven ones included; the last rank is asked first."""


def _sums(chance) -> tuple[list[float], list[int]]:
    """The summed losses of some ranks, and of how many tokens each is."""
    ranks = range(chance.randint(1, 8))
    sums, counts = zip(*((float(chance.randint(1, 90)), chance.randint(1, 40)) for _ in ranks), strict=True)
    return list(sums), list(counts)


global_mean = Task(
    lambda sums, counts: sum(sums) / sum(counts),
    shown={
        "sums 6 and 2 of four tokens each": ([6.0, 2.0], [4, 4]),
        "sums 8 and 1 of four tokens and one: tokens count equally, not ranks": ([8.0, 1.0], [4, 1]),
        "three ranks, sums 6, 1 and 2 of 3, 1 and 4 tokens": ([6.0, 1.0, 2.0], [3, 1, 4]),
    },
    what="sums {} of {} tokens",
    drawn=_sums,
    tolerance=1e-6,  # torch's default type will do
)
"""Exercise: the mean loss of a global batch from every rank's sum and count."""


def _asked(axis, answer, *held: int) -> tuple:
    import torch

    from ...ranks import comm

    got = answer(axis.rank, axis.size, torch.tensor(held[axis.rank]))
    return got, {op: n for (op, _), (n, *_) in comm.traffic().items()}, sent()


everywhere = ranked(
    ("what it knows", "calls", "bytes sent"),
    lambda rank, *held: (sum(held), {"all_reduce": 1}, Most(2 * 8)),
    _asked,
    lambda *held: len(held),
    shown={f"{held} tokens": held for held in ((10, 20, 30), (7, 2, 26, 5), (3, 1, 4, 2**24 + 1))},
    what="three ranks with {}, {} and {} tokens",
    drawn=lambda chance: tuple(chance.randint(1, 999) for _ in range(3)),
    count=1,
)
"""Exercise: the number of tokens on all ranks, known to every rank. Starts live ranks."""


traffic = Task(
    lambda parameters, each, ranks: 2 * (ranks - 1) / ranks * parameters * each,
    shown={
        "one rank sends nothing": (1_000_000, 4, 1),
        "a million float32 on 2 ranks: half out, half back": (1_000_000, 4, 2),
        "a million float32 on 4 ranks: 2 (n - 1) / n of all bytes": (1_000_000, 4, 4),
        "a million float64 on 4 ranks: mind the bytes of a number": (1_000_000, 8, 4),
        "900,000 float32 on 3 ranks, which is no power of two": (900_000, 4, 3),
    },
    what="{} numbers of {} bytes on {} ranks",
    drawn=lambda chance: (5040 * chance.randint(1, 99), chance.choice((2, 4, 8)), chance.randint(1, 10)),
)
"""Exercise: how many bytes a rank sends in one all-reduce of the gradients."""
