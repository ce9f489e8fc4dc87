"""Checkers of lesson 00: rows of a rank, the global mean, a sum over ranks, the bytes of an all-reduce."""

from . import close


def rows(answer) -> None:
    """Exercise: which rows of a batch a rank holds, uneven ones included."""
    for count, world in ((8, 2), (10, 4), (7, 2), (7, 3), (2, 3)):
        dealt = [list(answer(rank, world, count)) for rank in range(world)]
        every = [row for rows in dealt for row in rows]
        lost = sorted(set(range(count)) - set(every))
        assert not lost, f"{count} rows on {world} ranks: rows {lost} are on no rank"
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
    even = "sums 6 and 2 of two tokens each"
    close(answer([6.0, 2.0], [2, 2]), 2.0, even)
    close(
        answer([8.0, 1.0], [4, 1]),
        1.8,
        "sums 8 and 1 of four tokens and one: tokens count equally, not ranks",
    )


def everywhere(answer) -> None:
    """Exercise: the number of tokens on all ranks, known to every rank. Starts three ranks."""
    from ... import launch
    from ...ranks import comm

    asked = launch(lambda *rank: (answer(*rank), bool(comm.traffic())), ranks=3, echo=False)
    got, talked = zip(*asked, strict=True)
    assert got[0] is not None, "rank 0 returned None. Is the return missing?"
    assert got != (10, 20, 30), "every rank returned its own number: nothing was sent"
    assert all(talked), "a rank cannot know what the others hold: ask them, with comm.all_reduce"
    close(got, [60, 60, 60], "10, 20 and 30 tokens on three ranks")


def traffic(answer) -> None:
    """Exercise: how many bytes a rank sends in one all-reduce of the gradients."""
    close(answer(1_000_000, 4, 1), 0, "one rank sends nothing")
    close(answer(1_000_000, 4, 2), 4_000_000, "a million float32 on 2 ranks: half out, half back")
    close(answer(1_000_000, 4, 4), 6_000_000, "a million float32 on 4 ranks: 2 (n - 1) / n of all bytes")
    close(answer(1_000_000, 8, 4), 12_000_000, "a million float64 on 4 ranks: mind the bytes of a number")
