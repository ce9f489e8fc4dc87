"""Which rank owns which token: a layout is a table of positions, and everything else reads the table.

N ranks share one sequence of T tokens; t counts tokens from 0. Plain Python: no torch, no ranks.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from ...machine.arguments import checked
from ...ranks.traffic import split_sizes


@dataclass(frozen=True)
class TokenLayout:
    """The tokens of every rank: `positions[r]` lists what rank r owns, in ascending order.

    Raises ValueError unless every token 0..T-1 is owned exactly once.
    """

    name: str
    positions: tuple[tuple[int, ...], ...]

    def __post_init__(self):
        owned = sorted(t for mine in self.positions for t in mine)
        if owned != list(range(len(owned))) or any(list(mine) != sorted(mine) for mine in self.positions):
            raise ValueError(
                f"layout {self.name} does not own every token 0..{len(owned) - 1} exactly once, ascending on "
                f"each rank. Check its table of positions."
            )

    @property
    def ranks(self) -> int:
        """N, the number of ranks."""
        return len(self.positions)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many tokens each rank owns; they may differ."""
        return tuple(map(len, self.positions))

    @cached_property
    def tokens(self) -> int:
        """T, the length of the whole sequence."""
        return sum(self.sizes)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The owner of each token 0..T-1."""
        rank_of = {t: r for r, mine in enumerate(self.positions) for t in mine}
        return tuple(rank_of[t] for t in range(self.tokens))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The position of each row when the shards are laid end to end, as a gather leaves them."""
        return tuple(t for mine in self.positions for t in mine)

    @cached_property
    def inverse(self) -> tuple[int, ...]:
        """The indirection table: row `inverse[t]` of the gathered shards is token t."""
        return tuple(sorted(range(self.tokens), key=self.order.__getitem__))

    @cached_property
    def in_order(self) -> bool:
        """Whether shards laid end to end are the sequence already."""
        return self.order == tuple(range(self.tokens))


def bounds(tokens: int, parts: int) -> list[int]:
    """Ends of `parts` nearly equal slices of `tokens`; the first tokens % parts are one longer (tensor_split)."""
    return [0, *accumulate(split_sizes(tokens, parts))]


def _slices(name: str, ends: list[int]) -> TokenLayout:
    return TokenLayout(name, tuple(tuple(range(a, b)) for a, b in pairwise(ends)))


def contiguous(tokens: int, ranks: int) -> TokenLayout:
    """Rank i owns the slice from i T / N to (i + 1) T / N; early ranks have the short rows of the causal triangle."""
    return _slices("contiguous", bounds(tokens, ranks))


def unequal(tokens: int, ranks: int) -> TokenLayout:
    """Slices that end at T sqrt(i / N), so that each holds the same area of the causal triangle."""
    ends = [0]
    for i in range(1, ranks + 1):
        wished = round(tokens * math.sqrt(i / ranks))
        ends.append(max(ends[-1], min(max(wished, ends[-1] + 1), max(tokens - (ranks - i), ends[-1]))))
    return _slices("unequal", [min(end, tokens) for end in ends[:-1]] + [tokens])


def interleaved(tokens: int, ranks: int) -> TokenLayout:
    """Token t belongs to rank t mod N (striped attention, Brandon et al. 2023): every rank sees every length of row."""
    return TokenLayout("interleaved", tuple(tuple(range(r, tokens, ranks)) for r in range(ranks)))


def zigzag(tokens: int, ranks: int) -> TokenLayout:
    """2N chunks, rank r owns chunks r and 2N-1-r: a short one and the long one that makes up for it."""
    ends = bounds(tokens, 2 * ranks)
    mine = lambda c: tuple(range(ends[c], ends[c + 1]))
    return TokenLayout("zigzag", tuple(mine(r) + mine(2 * ranks - 1 - r) for r in range(ranks)))


LAYOUTS: dict[str, Callable[[int, int], TokenLayout]] = {
    f.__name__: f for f in (contiguous, unequal, interleaved, zigzag)
}


@checked(tokens=(1, 10**7), ranks=(1, 4096))
@lru_cache(maxsize=256)
def layout(name: str, tokens: int, ranks: int) -> TokenLayout:
    """The layout called `name` for T tokens over N ranks. Raises ValueError that lists the names if there is none."""
    if name not in LAYOUTS:
        raise ValueError(f"there is no layout called {name!r}. Use one of {', '.join(LAYOUTS)}.")
    return LAYOUTS[name](tokens, ranks)


def keys_seen(table: TokenLayout, rank: int, window: int | None = None) -> set[int]:
    """Every position that the queries of `rank` attend to: all earlier ones, or the `window` before each and itself."""
    mine = table.positions[rank]
    if window is None:
        return set(range(mine[-1] + 1)) if mine else set()
    return {t for q in mine for t in range(max(0, q - window), q + 1)}


@lru_cache(maxsize=256)
def lenders(table: TokenLayout, window: int | None = None) -> tuple[tuple[int, ...], ...]:
    """For each rank, the ranks (itself included) that own a key it attends to, ascending."""
    return tuple(
        tuple(sorted({table.owners[t] for t in keys_seen(table, r, window)})) for r in range(table.ranks)
    )


@lru_cache(maxsize=256)
def contributors(table: TokenLayout, root: int, window: int | None = None) -> tuple[int, ...]:
    """The ranks whose dK, dV of root's tokens are not zero. In a contiguous layout these are the ranks >= root.

    The BSC page says that ranks <= root can be left out of the reduction; the root's own part is not zero.
    """
    return tuple(r for r in range(table.ranks) if root in lenders(table, window)[r])


@dataclass(frozen=True)
class Loan:
    """Rank `target` borrows rows start..stop-1 of rank `source`'s shard."""

    source: int
    target: int
    start: int
    stop: int


@lru_cache(maxsize=256)
def everyone(table: TokenLayout, window: int | None = None) -> tuple[Loan, ...]:
    """All rows of every rank to every other rank."""
    n = range(table.ranks)
    return tuple(Loan(s, t, 0, table.sizes[s]) for t in n for s in n if s != t)


@lru_cache(maxsize=256)
def seen(table: TokenLayout, window: int | None = None) -> tuple[Loan, ...]:
    """All rows of a rank to every rank that attends to one of them: N-1-r borrowers in a contiguous layout."""
    needs = lenders(table, window)
    return tuple(Loan(s, t, 0, table.sizes[s]) for t in range(table.ranks) for s in needs[t] if s != t)


@checked(before=0, after=0)
@lru_cache(maxsize=256)
def loans(table: TokenLayout, before: int, after: int = 0) -> tuple[Loan, ...]:
    """All loans for halos of `before` tokens in front of each slice and `after` behind it (causal attention: none).

    Neighbours first, then those two hops away where a halo is wider than a shard. All ranks share this order, so
    blocking sends never wait in a circle; even sources come before odd ones, so that pairs work at the same time.
    Raises ValueError where a rank's tokens are no single slice.
    """
    found = []
    for r, mine in enumerate(table.positions):
        if mine and mine[-1] - mine[0] + 1 != len(mine):
            raise ValueError(
                f"halos surround one slice of the sequence, but in the {table.name} layout rank {r} owns tokens "
                f"{mine[0]} to {mine[-1]} with gaps. Use layout contiguous or unequal."
            )
        if not mine:
            continue
        for s, theirs in enumerate(table.positions):
            low, high = (mine[0] - before, mine[0]) if s < r else (mine[-1] + 1, mine[-1] + 1 + after)
            rows = [row for row, t in enumerate(theirs) if low <= t < high and s != r]
            if rows:
                found.append(Loan(s, r, rows[0], rows[-1] + 1))
    return tuple(sorted(found, key=lambda a: (abs(a.target - a.source), a.source % 2, a.source, a.target)))


def hops(table: TokenLayout, before: int) -> int:
    """How far the farthest lender is: 1 when every halo comes from a direct neighbour."""
    return max((abs(a.target - a.source) for a in loans(table, before)), default=0)


def check_hops(table: TokenLayout, window: int, allowed: int = 1) -> None:
    """Raise ValueError where a window of tokens needs halos from farther away than `allowed` ranks.

    Exact: each shard that lends must hold the window, or all tokens so far. (anemoi's first rule, window <= half of
    the last shard, is sufficient and not necessary: the last shard lends nothing to causal attention.)
    """
    if hops(table, window) > allowed:
        short = min(size for size in table.sizes[:-1] if size)
        choices = range(min(window, table.tokens) + 1)
        fits = bisect_right(choices, allowed, key=lambda w: hops(table, w)) - 1
        raise ValueError(
            f"a window of {window} tokens reaches across a shard of {short} tokens: it needs halos from "
            f"{hops(table, window)} ranks away, and {allowed} is allowed. Use a window of at most {fits}, fewer "
            f"ranks, or hops={hops(table, window)}."
        )


def widths(table: TokenLayout, rank: int, before: int, after: int = 0) -> tuple[int, int]:
    """How many rows a rank really borrows on each side: fewer at the ends of the sequence."""
    mine = table.positions[rank]
    if not mine:
        return 0, 0
    return min(before, mine[0]), min(after, table.tokens - 1 - mine[-1])
