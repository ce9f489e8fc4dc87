"""Checkers of lessons 10 and 11: owners, merging softmax blocks, contributors, halos and their adjoint."""

import itertools
import math
from contextlib import ExitStack

import torch

from ...parallel.context import costs
from ...parallel.context.layouts import LAYOUTS, TokenLayout, layout
from ...ranks import comm
from ..labs.context import NEIGHBOURS, wanted
from . import Task, returned, scored, unaided
from .differences import listed, named, randoms
from .ranked import ranked, sent
from .ring_attention import ring_backward as ring_backward
from .watching import no_gradient, noted, watched


def _two_chunks_each(chance) -> tuple[int, int, str]:
    ranks = chance.randint(1, 7)
    return 2 * ranks * chance.randint(1, 4), ranks, chance.choice(("interleaved", "zigzag"))


owner = Task(
    lambda tokens, ranks, name: LAYOUTS[name](tokens, ranks).owners,
    shown=[(12, 3, "interleaved"), (12, 3, "zigzag"), (16, 2, "zigzag"), (7, 4, "interleaved")],
    what="{2}, {0} tokens on {1} ranks",
    drawn=_two_chunks_each,
    call=lambda answer, tokens, *more: [returned(answer(t, tokens, *more)) for t in range(tokens)],
    closed=("gpt2lab.parallel",),
)
"""Exercise: the rank that owns a token in an interleaved and in a zigzag layout."""


def _rows(scores, seed: int) -> tuple:
    """Rows of these scores (rows, 7) in blocks of 2 and 5 keys: the blocks' outputs and log-sum-exps, and of both."""
    values = torch.randn(7, 3 + seed % 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    parts = [(scores, values), *zip(scores.split((2, 5), -1), values.split((2, 5)), strict=True)]
    whole, *blocks = [(s.softmax(-1).nan_to_num(0.0) @ v, s.logsumexp(-1, keepdim=True)) for s, v in parts]
    return *blocks[0], *blocks[1], dict(zip(MERGED, whole, strict=True))


MERGED = "the output", "its log-sum-exp"


def _merged(seed: int) -> dict[str, tuple]:
    scores = torch.randn(4 + seed % 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    far = scores + torch.tensor([0.0, 2000.0, -2000.0, 0.0, 0.0, 0.0])[: len(scores), None]
    one, both = far.clone(), far.clone()
    one[0, :2] = one[3, 2:] = both[1] = -torch.inf
    cases = {
        "two blocks": scores,
        "huge scores (does exp overflow?)": 1000 * scores,
        "rows of scores near 0, 2000 and -2000": far,
        "a row of which one block sees no key (L = -inf, o = 0) is the other block's": one,
        "a row that sees no key in either block stays (0, -inf)": both,
    }
    return {words: _rows(case, seed) for words, case in cases.items()}


merge = Task(
    lambda *blocks: blocks[-1],
    shown=_merged(0),
    what="blocks drawn by chance",
    drawn=lambda chance: chance.choice([*_merged(chance.randrange(99)).values()]),
    call=lambda answer, *blocks: answer(*blocks[:-1]),
    like=named(*MERGED),
    closed=("gpt2lab.parallel",),
    count=5,
)
"""Exercise: two blocks of attention become one."""


contributors = Task(
    lambda root, ranks: list(range(root, ranks)),
    shown=[(root, ranks) for ranks in (2, 4, 7) for root in range(ranks)],
    what="root {} of {}",
    drawn=lambda chance: (chance.randint(0, 4), chance.randint(5, 12)),
    like=lambda got, words: sorted(listed([*got])),
)
"""Exercise: which ranks contribute to the key gradients of a root, in a contiguous split."""


def _divided(chance) -> tuple[int, int]:
    ranks = chance.randint(1, 9)
    return ranks * chance.randint(1, 9), ranks


imbalance = Task(  # row t costs t + 1: a mean row of the last rank over a mean row of all
    lambda tokens, ranks: (2 * tokens - tokens // ranks + 1) / (tokens + 1),
    shown={
        "one rank is balanced by itself": (8, 1),
        "4 tokens on 2 ranks: rows cost 1, 2, 3, 4": (4, 2),
        "16 tokens on 4 ranks": (16, 4),
    },
    what="{} tokens on {} ranks",
    drawn=_divided,
    closed=("gpt2lab.parallel",),
)
"""Exercise: the busiest rank over the mean, of attention on contiguous slices."""


def spread(answer) -> str:
    """Puzzle: 12 blocks of 8 tokens, three for each of 4 ranks; the score is the busiest rank's pairs."""
    found = _shared_out(answer(), 4, 3, "block", "the ranks' MLPs")
    tokens = tuple(tuple(8 * b + i for b in sorted(mine) for i in range(8)) for mine in found)
    table = TokenLayout("yours", tokens)
    return scored(max(costs.pairs(table, r) for r in range(4)), "pairs", bar=1260, best=1196)


def _shared_out(found, ranks: int, each: int, thing: str, who: str):
    """Lists of twelve things, equally many for each rank and each thing once; AssertionError where they are not."""
    say = {3: "three", 4: "four"}
    found = listed(returned(found))
    lists = isinstance(found, list | tuple) and all(isinstance(mine, list | tuple) for mine in found)
    assert lists and len(found) == ranks, (
        f"{say[ranks]} lists, one a rank, with {say[each]} {thing}s in each; not {found}"
    )
    things = [x for mine in found for x in mine]
    for x in things:
        assert type(x) is int and x in range(12), f"{thing} {x} is none of 0 to 11"
        assert things.count(x) == 1, f"{thing} {x} has {things.count(x)} owners"
    counts = [len(mine) for mine in found]
    assert counts == [each] * ranks, (
        f"{say[each]} {thing}s a rank, and here are {counts}: {who} would not be balanced"
    )
    return found


def place(answer) -> str:
    """Puzzle: 12 points of a grid, four for each of 3 ranks; the score is the rows that ranks borrow."""
    looks = NEIGHBOURS.clone()
    found = _shared_out(answer(), 3, 4, "point", "the ranks")
    changed = not torch.equal(looks, NEIGHBOURS)
    NEIGHBOURS.copy_(looks)
    assert not changed, "who looks at whom is given: choose the ranks of the points, not their neighbours"
    rows = sum(len(points) for lists in wanted(found) for points in lists)
    return scored(rows, "rows borrowed", bar=12, best=11)


def _there_and_back(axis, there, back, sizes, heads: int, width: int) -> tuple:
    whole, first = _numbered(sizes, heads, width), sum(sizes[: axis.rank])
    shard = whole[first : first + sizes[axis.rank]].clone().requires_grad_()
    right = whole.tensor_split(axis.size, 1)[axis.rank].clone().requires_grad_()
    with watched() as seen:
        got, again = (unaided(f, __name__)(x, axis, sizes) for f, x in ((there, shard), (back, right)))
    traffic = comm.traffic()
    size, others = sum(size for _, size, _ in traffic.values()), {op for op, _ in traffic} - MESSAGES
    pairs = {"there": (got, shard), "back": (again, right)}
    fine = all(y is not None and y.shape == x.shape for y, x in ((got, right), (again, shard)))
    ours = all(comm.gather_objects(fine and not others, axis))
    lost = {way for way, pair in pairs.items() if ours and no_gradient(*pair)}
    return *(None if y is None else y.detach() for y in (got, again)), size, others, lost, seen.unwaited


MESSAGES = {"all_to_all", "send", "recv"}


def _numbered(sizes, heads: int, width: int) -> torch.Tensor:
    shape = sum(sizes), heads, width
    return torch.arange(float(math.prod(shape)), dtype=torch.float64).reshape(shape)


def _exchanged(rank: int, sizes, heads: int, width: int) -> tuple:
    whole = _numbered(sizes, heads, width)
    mine, tokens = whole.tensor_split(len(sizes), 1)[rank], whole.split(sizes)[rank]
    stays = mine.split(sizes)[rank].numel()
    return mine, tokens, 8 * (tokens.numel() + mine.numel() - 2 * stays), set(), set(), 0


to_heads = ranked(
    (
        "all tokens of its heads",
        "all heads of its tokens, back again",
        "bytes sent",
        "calls other than all_to_all and messages",
        "ways through which no right gradient comes",
        "sends that nobody waits for",
    ),
    _exchanged,
    _there_and_back,
    lambda sizes, *_: len(sizes),
    answers=2,
    shown=[((3, 4), 6, 5), ((2, 4, 3), 9, 4)],
    what="{1} heads, {0} tokens",
    drawn=lambda chance: (chance.choices(range(1, 6), k=4), 4 * chance.randint(1, 2), chance.randint(1, 6)),
    count=1,
)
"""Exercise: tokens for heads and back again, by all-to-all on live ranks, uneven tokens included."""


def _halo_gradients(sizes, window: int) -> list[torch.Tensor]:
    return randoms(0, *((n + window * (rank > 0), window + 1) for rank, n in enumerate(sizes)))


def _given_back(axis, answer, sizes, window: int) -> tuple:
    begun, given = [], _halo_gradients(sizes, window)[axis.rank]
    with watched() as seen, ExitStack() as watching:
        for place, name in ((comm, "isend"), (comm, "send"), (comm, "recv"), (comm.Handle, "wait")):
            watching.enter_context(noted(place, name, begun))
        got = unaided(answer, __name__)(mine := given.clone(), window, axis)
    late = axis.rank == 1 and begun[:1] in (["wait"], ["recv"]) and not {"isend", "send"}.isdisjoint(begun)
    return got, sent(), mine, late, seen.unwaited


def _added(rank: int, sizes, window: int) -> tuple:
    grads = _halo_gradients(sizes, window)
    own = grads[rank][window * (rank > 0) :].clone()
    if rank < len(sizes) - 1:
        own[-window:] += grads[rank + 1][:window]
    return own, window * (window + 1) * 8 * (rank > 0), grads[rank], False, 0


give_back = ranked(
    (
        "the gradient of its own rows",
        "bytes sent",
        "the gradient that it was given",
        "whether it sends only when its own message has come",
        "sends that nobody waits for",
    ),
    _added,
    _given_back,
    lambda sizes, *_: len(sizes),
    shown=[((4, 4, 4), 2), ((5, 3, 2), 3)],
    what="shards of {}, window {}",
    drawn=lambda chance: (chance.choices(range(4, 7), k=4), chance.randint(1, 4)),
    count=1,
)
"""Exercise: the adjoint of a causal halo of `window` rows on live ranks."""


def _shards(chance) -> tuple[tuple[int, ...], int]:
    """Unequal shards, and a window that may just be one hop."""
    sizes = tuple(chance.randint(1, 30) for _ in range(chance.randint(1, 8)))
    return sizes, max(1, chance.choice(sizes) + chance.randint(-1, 1))


smallest_shard = Task(
    lambda sizes, window: all(n >= min(window, sum(sizes[: r + 1])) for r, n in enumerate(sizes[:-1])),
    shown=[
        *(
            (layout("contiguous", tokens, ranks).sizes, window)
            for tokens, ranks, window in itertools.product((7, 12, 16), (2, 3, 4), range(1, 9))
        ),
        *itertools.product(((6, 2, 4, 1), (1, 5, 5), (5, 1, 1, 6), (4, 1, 3, 6)), range(1, 7)),
    ],
    what="shards of {}, window {}: is one hop enough",
    drawn=_shards,
)
"""Exercise: whether a causal window needs only the direct neighbour, exactly."""
