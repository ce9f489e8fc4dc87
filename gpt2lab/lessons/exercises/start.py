"""Checkers of lesson 00: rows of a rank, the global mean, a sum over ranks, the bytes of an all-reduce."""

from . import close, live, returned


def rows(answer) -> None:
    """Exercise: which rows of a batch a rank holds, uneven ones included."""
    for count, world in ((8, 2), (10, 4), (7, 2), (7, 3), (2, 3), (5, 1)):
        last_first = [returned(answer(rank, world, count)) for rank in reversed(range(world))]
        dealt = [[int(row) for row in rows] for rows in reversed(last_first)]
        every = [row for rows in dealt for row in rows]
        lost = sorted(set(range(count)) - set(every))
        assert not lost, f"{count} rows on {world} ranks: rows {lost} are on no rank"
        beyond = sorted(set(every) - set(range(count)))
        assert not beyond, f"{count} rows on {world} ranks: there is no row {beyond[0]}"
        assert len(every) == count, f"{count} rows on {world} ranks: some rows are on two ranks, {dealt}"
        sizes = [len(rows) for rows in dealt]
        assert max(sizes) - min(sizes) <= 1, (
            f"{count} rows on {world} ranks: sizes {sizes} differ by more than one"
        )
        assert sizes == sorted(sizes, reverse=True), (
            f"{count} rows on {world} ranks: sizes {sizes}, but the first ranks should hold more"
        )
        assert every == sorted(every), (
            f"{count} rows on {world} ranks: neighbours should stay together, not {dealt}"
        )


def global_mean(answer) -> None:
    """Exercise: the mean loss of a global batch from every rank's sum and count."""
    even = "sums 6 and 2 of four tokens each"
    close(answer([6.0, 2.0], [4, 4]), 1.0, even)
    close(
        answer([8.0, 1.0], [4, 1]),
        1.8,
        "sums 8 and 1 of four tokens and one: tokens count equally, not ranks",
    )
    close(answer([6.0, 1.0, 2.0], [3, 1, 4]), 9 / 8, "three ranks, sums 6, 1 and 2 of 3, 1 and 4 tokens")


def everywhere(answer) -> None:
    """Exercise: the number of tokens on all ranks, known to every rank. Starts live ranks."""
    known = {}  # by the number of ranks
    for held in ((10, 20, 30), (7, 2, 26, 5), (3, 1, 4, 2**24 + 1)):
        case = f"{', '.join(map(str, held))} tokens on {len(held)} ranks"
        got, talked = zip(*live(_asked, answer, held, ranks=len(held), what=case), strict=True)
        assert got[0] is not None, "rank 0 returned None. Is the return missing?"
        assert got != held, "every rank returned its own number: nothing was sent"
        assert all(talked), "a rank cannot know what the others hold: ask them, with comm.all_reduce"
        assert len(set(got)) == 1, f"{case}: the ranks say {list(got)}; all of them should know the sum"
        assert got[0] != 60 or sum(held) == 60, (
            f"{case}: 60 again, as for 10, 20 and 30. Sum what arrives as `mine`, not what a formula says"
        )
        assert got[0] != known.get(len(held)), (
            f"{case}: {got[0]:g} again, as for other tokens on as many ranks"
        )
        close(float(got[0]), sum(held), case)
        known[len(held)] = got[0]
    assert set(talked) == {(("all_reduce", 1),)}, (
        f"{case}: right, by {' and '.join(f'{n} {op}' for op, n in talked[0])}. One all_reduce is enough: "
        "what else says the same sends more"
    )


def _asked(rank, world_size, answer, held):
    import torch

    from ...ranks import comm

    got = answer(rank, world_size, torch.tensor(held[rank]))
    return None if got is None else float(got), tuple((op, n) for (op, _), (n, *_) in comm.traffic().items())


def traffic(answer) -> None:
    """Exercise: how many bytes a rank sends in one all-reduce of the gradients."""
    close(answer(1_000_000, 4, 1), 0, "one rank sends nothing")
    close(answer(1_000_000, 4, 2), 4_000_000, "a million float32 on 2 ranks: half out, half back")
    close(answer(1_000_000, 4, 4), 6_000_000, "a million float32 on 4 ranks: 2 (n - 1) / n of all bytes")
    close(answer(1_000_000, 8, 4), 12_000_000, "a million float64 on 4 ranks: mind the bytes of a number")
    close(answer(900_000, 4, 3), 4_800_000, "900,000 float32 on 3 ranks, which is no power of two")
