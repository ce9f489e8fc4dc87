"""Checkers of lesson 15: places, groups, who gets the fast links, who sends what to another plan, the norm."""

import itertools
import math
from functools import cache, partial
from inspect import signature
from types import MappingProxyType

import numpy as np
import torch

from ...machine.links import Link
from ...ranks import comm
from ...reference import CONFIG, example_batch, example_weights, serial_gradients, serial_model
from ..labs.meshes import slow_bytes
from . import Puzzle, Task, unaided
from .differences import Most, equal, listed, randoms
from .ranked import ALL, ranked, sent, start_counting
from .watching import watched

MESHES = (
    {"dp": 2, "tp": 2},
    {"pp": 2, "dp": 3, "tp": 2},
    {"pp": 2, "cp": 2, "tp": 3},
    {"tp": 2, "pp": 3, "dp": 2},
)


def drawn_sizes(chance) -> dict[str, int]:
    """The sizes of one to four axes in any order."""
    names = chance.sample(("pp", "dp", "cp", "tp"), chance.randint(1, 4))
    return {axis: chance.choice((1, 2, 2, 3, 4, 6)) for axis in names}


def _place(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    return dict(zip(sizes, map(int, np.unravel_index(rank, list(sizes.values()))), strict=True))


def _groups(axis: str, sizes: dict[str, int]) -> list[list[int]]:
    """The groups of an axis in the order of their first ranks, each in the order of places on the axis."""
    ranks = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
    return sorted(np.moveaxis(ranks, list(sizes).index(axis), -1).reshape(-1, sizes[axis]).tolist())


coordinates = Task(
    _place,
    shown=[(rank, sizes) for sizes in MESHES for rank in range(math.prod(sizes.values()))],
    what="the place of rank {} in {}",
    drawn=lambda chance: (chance.randrange(math.prod((sizes := drawn_sizes(chance)).values())), sizes),
)
"""Exercise: a rank's place on every axis; the sizes name the axes from the outermost to the innermost."""

groups = Task(
    _groups,
    shown=[(axis, sizes) for sizes in MESHES for axis in sizes],
    what="the groups of {} in {}",
    drawn=lambda chance: (chance.choice(list(sizes := drawn_sizes(chance))), sizes),
    like=lambda got, words: sorted(listed(list(got))),
)
"""Exercise: all groups of one axis, each a tuple of ranks, the first on the axis first."""


CASES = (  # what one rank sends a step: (messages, bytes)
    ({"dp": (40, 4e7), "tp": (2, 1e5)}, Link(1e-5, 1e9), Link(1e-3, 1e8)),
    ({"dp": (2, 4e6), "tp": (40, 2e6)}, Link(1e-5, 1e9), Link(1e-3, 1e8)),
    ({"dp": (2, 9e6), "tp": (40, 2e6)}, Link(1e-5, 1e9), Link(1e-4, 1e8)),
    ({"cp": (8, 3e6), "tp": (20, 1e6)}, Link(1e-5, 1e8), Link(1e-3, 1e8)),
)


def _links(chance):
    """Two axes and two kinds of links, of which both latencies and both bandwidths matter."""
    sent = {
        axis: (chance.randint(1, 40), 1e5 * chance.randint(1, 99))
        for axis in chance.sample(("dp", "tp", "cp"), 2)
    }
    inside = Link(1e-3 * chance.randint(0, 9), 1e8 * chance.randint(1, 9))
    between = Link(inside.latency + 1e-4 * chance.randint(0, 5), inside.bandwidth / chance.randint(1, 5))
    totals = [_total(sent, axis, inside, between) for axis in sent]
    return (sent, inside, between) if max(totals) > 1.01 * min(totals) else _links(chance)


def _best_inside(sent, inside: Link, between: Link) -> str:
    return min(sent, key=lambda axis: _total(sent, axis, inside, between))


def _total(sent, inner, inside: Link, between: Link) -> float:
    """Seconds of all messages with one axis inside."""
    return sum((inside if a == inner else between).time(size, count) for a, (count, size) in sent.items())


placement = Task(
    _best_inside,
    shown=CASES,
    what="{}, {} inside a node, {} between nodes",
    drawn=_links,
    closed=("gpt2lab.planner",),  # a link's own methods are open
)
"""Exercise: which axis gets the links inside a node, the other one those between nodes."""


def _norm_on_a_rank(axis, answer, text: str, times: float) -> tuple:
    from ..labs.instruments import trainer_by

    trainer = trainer_by(text)
    parallel = trainer.parallel
    parallel.load(example_weights(CONFIG))
    trainer.gradients(example_batch(CONFIG, 7, 11))
    held = parallel.sync.pieces
    before = [piece.tensor.grad.mul_(times).clone() for piece in held]  # no other model has these gradients
    start_counting()
    value = unaided(answer, __name__, "gpt2lab.parallel.finish")(list(held), parallel.mesh)
    changed = not equal([piece.tensor.grad for piece in held], before)
    return None if value is None else float(value), changed, sum(e.bytes for e in comm.log)


@cache
def _norm_in_one() -> float:
    model = serial_model(CONFIG, example_weights(CONFIG))
    return serial_gradients(model, example_batch(CONFIG, 7, 11))[2].item()


norm = ranked(
    ("the norm", "whether gradients change", "bytes sent, as one number need travel,"),
    lambda rank, text, times: (times * _norm_in_one(), False, Most(400)),
    _norm_on_a_rank,
    4,
    shown=[("dp=2,tp=2", 1.0), ("pp=2,tp=2,micro=2", 1.0)],
    what="{}",
    drawn=lambda chance: (chance.choice(("dp=2,tp=2", "pp=2,tp=2,micro=2")), chance.randint(2, 99) / 7),
    count=1,
    tolerance=1e-9,
)
"""Exercise: the norm of the whole gradient from this rank's pieces and their specs."""


SIZES = MappingProxyType({"pp": 2, "dp": 3, "cp": 2, "tp": 4})


def _no_order(found) -> dict:
    if not isinstance(found, list | tuple):
        return {f"a list of four names, outermost first; not {found!r}": True}
    count = {axis: list(found).count(axis) for axis in SIZES}
    return {
        **{
            f"there is no axis {axis!r}. There are {', '.join(SIZES)}": axis not in [*SIZES] for axis in found
        },
        **{
            f"{axis} is missing: every axis has its place, also the small ones": not count[axis]
            for axis in SIZES
        },
        **{f"{axis} stands there {count[axis]} times": count[axis] > 1 for axis in SIZES},
    }


axes = Puzzle(
    lambda found: slow_bytes(found, SIZES, {"pp": 20, "dp": 500, "cp": 300, "tp": 600}, 8),
    "MB between nodes",
    bar=30_560,
    best=24_960,
    rules=_no_order,
)
"""Puzzle: the order of four axes on six nodes of 8 ranks; the score is megabytes between nodes."""


def _stretches(chance) -> tuple:
    """What some ranks have of a vector, all of it together, and what they want."""
    ranks, length = chance.randint(2, 5), chance.randint(6, 20)
    ends = [0, *sorted(chance.sample(range(1, length), chance.randint(0, ranks - 1))), length]
    parts = list(itertools.pairwise(ends))
    have = parts + chance.choices(parts, k=ranks - len(parts))
    return chance.sample(have, ranks), [
        tuple(sorted(chance.sample(range(length + 1), 2))) for _ in range(ranks)
    ]


def _vector(have, seed: int = 0) -> torch.Tensor:
    return randoms(seed, (max(stop for _, stop in have),))[0]


def _handed_out(rank: int, have, want, seed: int = 0) -> tuple:
    whole, lacked = _vector(have, seed), set(range(*want[rank])) - set(range(*have[rank]))
    return whole[slice(*want[rank])], whole[slice(*have[rank])], 0, 0, 8 * len(lacked)


def _handed_on_a_rank(axis, answer, have, want, seed: int = 0) -> tuple:
    mine = _vector(have, seed)[slice(*have[axis.rank])].clone()
    with watched() as seen:
        got = answer(mine, have, want, axis)
    return got, mine, len(seen.sent) - len(seen.asked), seen.unwaited, sent()


handed_out = ranked(
    (
        "its stretch",
        "what it had",
        f"messages that nobody receives, {ALL}",
        "sends that nobody waits for",
        f"bytes sent {ALL}",
    ),
    _handed_out,
    _handed_on_a_rank,
    lambda have, *_: len(have),
    shown=(
        ([(0, 6), (6, 12), (0, 6), (6, 12)], [(0, 3), (3, 6), (6, 9), (9, 12)]),
        ([(0, 3), (3, 6), (6, 9), (9, 12)], [(0, 12), (0, 6), (6, 12), (2, 7)]),
    ),
    what="have {0}, want {1}",
    drawn=lambda chance: (*_stretches(chance), chance.randrange(1000)),
    count=3,
)


def messages(answer) -> None:
    """Exercise: stretches of a vector pass to the ranks that want them, each number once and only where it lacks.

    It was once asked for as a list of messages (from, to, start, stop), which is then sent on the live ranks.
    """
    own = unaided(answer, __name__, "gpt2lab.lessons.labs")
    handed_out(own if len(signature(answer).parameters) > 2 else partial(_listed, own))


def _listed(answer, mine, have, want, axis) -> torch.Tensor:
    begin, (first, last) = have[axis.rank][0], want[axis.rank]
    found = mine.new_full((max(stop for _, stop in have),), math.nan)
    found[begin : begin + len(mine)] = mine
    listed = [tuple(map(int, one)) for one in answer(have, want)]
    going = [
        comm.isend(mine[i - begin : j - begin], axis, to) for rank, to, i, j in listed if rank == axis.rank
    ]
    for source, to, i, j in listed:
        if to == axis.rank:
            found[i:j] = comm.irecv(mine.new_empty(j - i), axis, source).wait()
    for handle in going:
        handle.wait()
    return found[first:last]
