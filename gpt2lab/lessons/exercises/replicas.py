"""Checkers of lesson 18 about replicas: which of them is wrong, and who keeps whose copy."""

from collections.abc import Set

from . import Task
from .differences import listed


def _odd_ones(digests: list[dict[str, int]]) -> list[tuple[int, str]]:
    """Every (rank, name) whose digest at most half of the ranks have."""
    held = [(rank, name) for rank, mine in enumerate(digests) for name in mine]
    return [(rank, name) for rank, name in held if 2 * _alike(digests, rank, name) <= len(digests)]


def _alike(digests: list[dict[str, int]], rank: int, name: str) -> int:
    """How many ranks have the digest that a rank has of this parameter."""
    return sum(theirs[name] == digests[rank][name] for theirs in digests)


def _some(*ranks: str) -> tuple[list[dict[str, int]]]:
    """Digests of ranks of which each is told as letters, one a parameter: "ab" is {"wte": 97, "wpe": 98}."""
    return ([dict(zip(("wte", "wpe", "ln_f"), map(ord, letters), strict=False)) for letters in ranks],)


def _pairs(found, words: str) -> list[tuple]:
    found = listed(found)
    pairs = isinstance(found, list | tuple | Set) and all(isinstance(p, list | tuple) for p in found)
    assert pairs, f"{words}: return a list of (rank, name), not {found!r}"
    return sorted(map(tuple, found))


def _blamed(found: list[tuple], digests: list[dict[str, int]]) -> dict:
    wanted, ranks = _odd_ones(digests), len(digests)
    words = lambda pair: f"{pair}, whose digest {_alike(digests, *pair)} of {ranks} ranks have"
    known = [pair for pair in found if pair in [(r, n) for r in range(ranks) for n in digests[0]]]
    return {
        f"not a (rank, name): {set(found) - set(known)}": known != found,
        **{f"you leave out {words(pair)}": pair not in found for pair in wanted},
        **{f"you blame {words(pair)}": pair not in wanted for pair in known},
        "each pair once, please": len(set(found)) < len(found),
    }


odd_ones = Task(
    lambda digests: sorted(_odd_ones(digests)),
    shown={
        "three replicas, one bit in rank 1's wpe": _some("ab", "ac", "ab"),
        "three replicas, all equal": _some("ab", "ab", "ab"),
        "three replicas, one bit in rank 0": _some("ab", "cb", "cb"),
        "a wrong wte that has the digest of wpe": _some("ab", "ab", "bb"),
        "five replicas, two of them wrong": _some("ab", "cb", "ab", "ad", "ab"),
        "two replicas, and nobody knows who is right": _some("ab", "cb"),
        "four replicas, two against two": _some("a", "a", "b", "b"),
        "five replicas, two wrong in the same way": _some("a", "b", "a", "b", "a"),
    },
    what="digests {}",
    drawn=lambda chance: _some(
        *("".join(chance.choices("ab", (4, 1), k=3)) for _ in range(chance.randint(1, 9)))
    ),
    like=_pairs,
    rules=_blamed,
)
"""Exercise: the (rank, name) that most of the replicas contradict, given each rank's digests by name."""


def _lost(keepers: list[int]) -> int:
    """How many pairs of ranks lose a shard when both die: it and the only copy of it."""
    return len({frozenset(pair) for pair in enumerate(keepers)})


def _keeping(found, ranks: int) -> dict:
    inside = isinstance(found, list | tuple) and len(found) == ranks and set(found) <= set(range(ranks))
    if not inside:
        return {f"give {ranks} ranks between 0 and {ranks - 1}, the keeper of each, not {found!r}": True}
    own = [rank for rank, keeper in enumerate(found) if rank == keeper]
    most = max(found, key=list(found).count)
    least = ranks // 2 + 2 * (ranks % 2)
    return {
        f"rank {own[0]} keeps its own shard, which dies with it" if own else "": own,
        f"rank {most} keeps {list(found).count(most)} copies; there is room for one": len(set(found)) < ranks,
        f"{_lost(found)} pairs of ranks lose a shard when both die; {least} can do": _lost(found) > least,
    }


keepers = Task(
    None,
    shown=[(4,), (5,), (3,), (2,), (9,)],
    what="{} ranks",
    drawn=lambda chance: (chance.randint(2, 40),),
    like=lambda found, words: listed(found),
    rules=_keeping,
)
"""Exercise: which rank keeps the copy of each rank's shard, so that fewest pairs of deaths lose one (Wang et al.)."""
