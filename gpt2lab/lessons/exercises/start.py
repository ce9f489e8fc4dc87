"""Checkers of lesson 00: rows of a rank, the global mean, a sum over ranks, the bytes of an all-reduce."""

from ...parallel.zero.costs import all_reduce_bytes
from . import close, live, returned
from .engine import Task, by_chance, called


def rows(answer) -> None:
    """Exercise: which rows of a batch a rank holds, uneven ones included."""
    for count, world in ((8, 2), (10, 4), (7, 2), (7, 3), (2, 3), (5, 1)):
        _rows_of(answer, count, world)
    by_chance(lambda chance: _rows_of(answer, chance.randint(0, 40), chance.randint(1, 9)))


def _rows_of(answer, count: int, world: int) -> None:
    what = f"{count} rows on {world} ranks"
    last_first = [returned(called(answer, (rank, world, count), what)) for rank in reversed(range(world))]
    dealt = [[int(row) for row in rows] for rows in reversed(last_first)]
    every = [row for rows in dealt for row in rows]
    lost = sorted(set(range(count)) - set(every))
    assert not lost, f"{what}: rows {lost} are on no rank"
    beyond = sorted(set(every) - set(range(count)))
    assert not beyond, f"{what}: there is no row {beyond[0]}"
    assert len(every) == count, f"{what}: some rows are on two ranks, {dealt}"
    sizes = [len(rows) for rows in dealt]
    assert max(sizes) - min(sizes) <= 1, f"{what}: sizes {sizes} differ by more than one"
    assert sizes == sorted(sizes, reverse=True), (
        f"{what}: sizes {sizes}, but the first ranks should hold more"
    )
    assert every == sorted(every), f"{what}: neighbours should stay together, not {dealt}"


global_mean = Task(
    lambda sums, counts: sum(sums) / sum(counts),
    shown={
        "sums 6 and 2 of four tokens each": ([6.0, 2.0], [4, 4]),
        "sums 8 and 1 of four tokens and one: tokens count equally, not ranks": ([8.0, 1.0], [4, 1]),
        "three ranks, sums 6, 1 and 2 of 3, 1 and 4 tokens": ([6.0, 1.0, 2.0], [3, 1, 4]),
    },
    what="sums {} of {} tokens",
    drawn=lambda chance: tuple(
        zip(
            *((float(chance.randint(1, 90)), chance.randint(1, 40)) for _ in range(chance.randint(1, 8))),
            strict=True,
        )
    ),
    tolerance=1e-6,  # torch's default type will do
)
"""Exercise: the mean loss of a global batch from every rank's sum and count."""


def everywhere(answer) -> None:
    """Exercise: the number of tokens on all ranks, known to every rank. Starts live ranks."""
    known = {}  # by the number of ranks
    for held in ((10, 20, 30), (7, 2, 26, 5), (3, 1, 4, 2**24 + 1)):
        talked = _known_of(answer, held, known)
    assert [op for op, *_ in talked] == ["all_reduce"] and talked[0][1] == 1, (
        f"right, by {' and '.join(f'{n} {op}' for op, n, _ in talked)}. One all_reduce is enough: "
        "what else says the same sends more"
    )
    sent, best = talked[0][2], all_reduce_bytes(1, len(held), 0, 8)
    assert sent <= best, (
        f"right, but rank 0 sent {sent} bytes: a sum of one number takes {best}, and nobody asked for a list of all"
    )
    by_chance(lambda chance: _known_of(answer, tuple(chance.randint(1, 999) for _ in range(3)), {}), 1)


def _known_of(answer, held: tuple, known: dict) -> tuple:
    """What rank 0 called, where all is well: (operation, how often, bytes)."""
    case = f"{', '.join(map(str, held))} tokens on {len(held)} ranks"
    got, talked = zip(*live(_asked, answer, held, ranks=len(held), what=case), strict=True)
    assert got[0] is not None, "rank 0 returned None. Is the return missing?"
    assert got != held, "every rank returned its own number: nothing was sent"
    assert all(talked), "a rank cannot know what the others hold: ask them, with comm.all_reduce"
    assert len(set(got)) == 1, f"{case}: the ranks say {list(got)}; all of them should know the sum"
    assert got[0] != 60 or sum(held) == 60, (
        f"{case}: 60 again, as for 10, 20 and 30. Sum what arrives as `mine`, not what a formula says"
    )
    assert got[0] != known.get(len(held)), f"{case}: {got[0]:g} again, as for other tokens on as many ranks"
    close(float(got[0]), sum(held), case)
    known[len(held)] = got[0]
    return talked[0]


def _asked(rank, world_size, answer, held):
    import torch

    from ...ranks import comm

    got = answer(rank, world_size, torch.tensor(held[rank]))
    calls = tuple((op, n, size) for (op, _), (n, size, _) in comm.traffic().items())
    return None if got is None else float(got), calls


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
