"""Checkers of lessons 10 and 11: owners, merging softmax blocks, contributors, halos and their adjoint."""

import itertools
from contextlib import ExitStack

import torch

from ...parallel.context import costs
from ...parallel.context.layouts import LAYOUTS, TokenLayout, hops, layout
from ...ranks import comm
from ...ranks.mesh import Mesh
from ..labs.context import NEIGHBOURS, wanted
from . import Task, by_chance, called, close, live, returned, scored, unaided
from .ring_attention import ring_backward as ring_backward
from .watching import no_gradient, noted


def _wrong_owner(got: tuple, tokens: int, ranks: int, name: str) -> dict:
    want = LAYOUTS[name](tokens, ranks).owners
    assert None not in got, "your function returned None. Is the return missing?"
    return {
        f"token {got.index(max(got))} went to rank {max(got)} of only {ranks}": max(got) >= ranks,
        f"owners should be {want}, not {got}": got != want,
    }


def _two_chunks_each(chance) -> tuple[int, int, str]:
    ranks = chance.randint(1, 7)
    return 2 * ranks * chance.randint(1, 4), ranks, chance.choice(("interleaved", "zigzag"))


owner = Task(
    None,
    shown=[(12, 3, "interleaved"), (12, 3, "zigzag"), (16, 2, "zigzag"), (7, 4, "interleaved")],
    what="{2}, {0} tokens on {1} ranks",
    drawn=_two_chunks_each,
    call=lambda answer, tokens, *more: tuple(answer(t, tokens, *more) for t in range(tokens)),
    rules=_wrong_owner,
    closed=("gpt2lab.parallel",),
)
"""Exercise: the rank that owns a token in an interleaved and in a zigzag layout."""


def merge(answer) -> None:
    """Exercise: two blocks of attention become one."""
    answer = unaided(answer, "gpt2lab.parallel")
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 300.0):
        scores = scale * torch.randn(3, 7, dtype=torch.float64, generator=generator)
        values = torch.randn(7, 2, dtype=torch.float64, generator=generator)
        blocks = [
            (s.softmax(-1) @ v, s.logsumexp(-1, keepdim=True))
            for s, v in zip(scores.split((2, 5), -1), values.split((2, 5)), strict=True)
        ]
        given = [t.clone() for block in blocks for t in block]
        got = returned(answer(*given))
        assert isinstance(got, list | tuple) and len(got) == 2, (
            "return two things: the output, and its log-sum-exp"
        )
        out, lse = got
        same = all(map(torch.equal, given, [t for block in blocks for t in block]))
        assert same, "your function changed the blocks it was given: backward needs them; make new ones"
        words = "merged output" + (" of huge scores (does exp overflow?)" if scale > 1 else "")
        close(out, scores.softmax(-1) @ values, words)
        close(lse, scores.logsumexp(-1, keepdim=True), "merged log-sum-exp")
    _merge_rows(answer)


def _merge_rows(answer) -> None:
    """Rows whose scores differ much in size, and rows of which one block is hidden altogether, or both are."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(4, 7, dtype=torch.float64, generator=generator)
    values = torch.randn(7, 5, dtype=torch.float64, generator=generator)
    scores += torch.tensor([0.0, 2000.0, -2000.0, 0.0])[:, None]
    one, both = scores.clone(), scores.clone()
    one[0, :2] = one[3, 2:] = both[1] = -torch.inf
    for seen, words in (
        (scores, "rows of scores near 0, 2000 and -2000: each row needs a maximum of its own"),
        (one, "a row of which one block sees no key (L = -inf, o = 0) is the other block's"),
        (both, "a row that sees no key in either block stays (0, -inf)"),
    ):
        blocks = []
        for s, v in zip(seen.split((2, 5), -1), values.split((2, 5)), strict=True):
            blocks += [s.softmax(-1).nan_to_num(0.0) @ v, s.logsumexp(-1, keepdim=True)]
        out, lse = called(answer, tuple(blocks), words)
        close(out, seen.softmax(-1).nan_to_num(0.0) @ values, words)
        close(lse, seen.logsumexp(-1, keepdim=True), f"log-sum-exp, {words}")


contributors = Task(
    None,
    shown=[(root, ranks) for ranks in (2, 4, 7) for root in range(ranks)],
    what="root {} of {}",
    drawn=lambda chance: (chance.randint(0, 4), chance.randint(5, 12)),
    like=lambda got, words: sorted(int(rank) for rank in got),
    rules=lambda got, root, ranks: {
        "its own queries see its own keys": root not in got,
        f"expected ranks {root} to {ranks - 1}, got {got}": got != list(range(root, ranks)),
    },
)
"""Exercise: which ranks contribute to the key gradients of a root, in a contiguous split."""


def _busiest(tokens: int, ranks: int) -> float:
    size = tokens // ranks
    busiest = sum(range(tokens - size + 1, tokens + 1))  # the last rank's rows cost the most
    return busiest * ranks / (tokens * (tokens + 1) / 2)


def _divided(chance) -> tuple[int, int]:
    ranks = chance.randint(1, 9)
    return ranks * chance.randint(1, 9), ranks


imbalance = Task(
    _busiest,
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
    returned(found)
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


MESSAGES = {"all_to_all", "send", "recv"}


def to_heads(there, back) -> None:
    """Exercise: tokens for heads and back again, by all-to-all on live ranks, uneven tokens included."""
    for ranks, sizes, heads, width in ((2, (3, 4), 6, 5), (3, (2, 4, 3), 9, 4)):
        what, tokens = f"{heads} heads, {sizes} tokens on {ranks} ranks", sum(sizes)
        whole = torch.arange(tokens * heads * width, dtype=torch.float64).reshape(tokens, heads, width)
        found = live(_there_and_back, there, back, whole, sizes, ranks=ranks, what=what)
        for rank, (got, again, sent, ops, grads) in enumerate(found):
            want = whole[:, rank * heads // ranks : (rank + 1) * heads // ranks]
            assert got is not None and again is not None, (
                "your function returned None. Is the return missing?"
            )
            assert tuple(got.shape) == tuple(want.shape), (
                f"{what}: rank {rank} should hold {tuple(want.shape)}, all tokens of its heads, not {tuple(got.shape)}"
            )
            close(got, want, f"{what}: rank {rank}'s heads")
            first = sum(sizes[:rank])
            close(again, whole[first : first + sizes[rank]], f"{what}: there and back again, on rank {rank}")
            leave = (
                sizes[rank] * heads * width * 8 * (ranks - 1) // ranks
                + (tokens - sizes[rank]) * heads // ranks * width * 8
            )
            assert sent == leave, (
                f"{what}: rank {rank} sent {sent} bytes; what has to leave it there and back is {leave}"
            )
            others = sorted(ops - MESSAGES)
            assert not others, f"right, but by {', '.join(others)}: the other ranks wait while one sends"
            for side, lost in zip(("there", "back"), grads, strict=True):
                assert not lost, f"rank {rank}: no gradient comes through your way {side}, or a wrong one"


def _there_and_back(rank, world_size, there, back, whole, sizes):
    axis = Mesh(cp=world_size)["cp"]
    first, each = sum(sizes[:rank]), whole.size(1) // world_size
    shard = whole[first : first + sizes[rank]].clone().requires_grad_()
    right = whole[:, rank * each : (rank + 1) * each].clone().requires_grad_()
    comm.clear_log()
    got = there(shard, axis, sizes)
    again = back(right, axis, sizes)
    traffic = comm.traffic()
    ops = {op for op, _ in traffic}
    fine = (
        ops <= MESSAGES
        and got is not None
        and again is not None
        and got.shape == right.shape
        and again.shape == shard.shape
    )
    fine = all(comm.gather_objects(fine, axis))
    lost = [no_gradient(y, x) if fine else False for y, x in ((got, shard), (again, right))]
    sent = sum(size for _, size, _ in traffic.values())
    return *(None if y is None else y.detach() for y in (got, again)), sent, ops, lost


def give_back(answer) -> None:
    """Exercise: the adjoint of a causal halo of `window` rows on three live ranks."""
    generator = torch.Generator().manual_seed(0)
    for sizes, window in (((4, 4, 4), 2), ((5, 3, 2), 3)):
        shards = [torch.randn(n, 2, dtype=torch.float64, generator=generator) for n in sizes]
        wide = [torch.cat([a[len(a) - window :], b]) for a, b in itertools.pairwise(shards)]
        wide = [shards[0], *wide]
        grads = [torch.randn(w.shape, dtype=torch.float64, generator=generator) for w in wide]
        what = f"shards of {sizes}, window {window}"
        found = live(_given_back, answer, grads, window, ranks=3, what=what)
        got, sent, late, changed = zip(*found, strict=True)
        assert all(g is not None for g in got), "your function returned None. Is the return missing?"
        shapes = [tuple(g.shape) for g in got]
        assert shapes == [tuple(s.shape) for s in shards], (
            f"{what}, own rows only: shapes should be {[tuple(s.shape) for s in shards]}, not {shapes}"
        )
        there = sum((w * g).sum() for w, g in zip(wide, grads, strict=True))
        back = sum((s * g).sum() for s, g in zip(shards, got, strict=True))
        close(back, there, f"{what}: <x, H'y> against <Hx, y>: lent rows have two gradients, add them")
        for rank in range(3):
            want = grads[rank][window if rank else 0 :].clone()
            if rank < 2:
                want[-window:] += grads[rank + 1][:window]
            close(got[rank], want, f"{what}: the gradient of rank {rank}'s own rows")
        right = [window * 2 * 8 * (rank > 0) for rank in range(3)]
        assert sum(sent) >= sum(right), (
            f"{what}: a send counts when it is waited for, and some of yours never are"
        )
        assert list(sent) == right, (
            f"{what}: ranks sent {list(sent)} bytes; the halo's gradient goes to its owner and no further: {right}"
        )
        assert not any(changed), (
            f"right, but rank {changed.index(True)} writes into the gradient that it was given, which others may need: "
            "work on a copy"
        )
        assert not any(late), (
            "right, but rank 1 sends only when its own message has come: so ranks take turns, and n of them take n "
            "times as long. What it sends does not depend on what comes"
        )


def _given_back(rank, world_size, answer, grads, window):
    axis, begun = Mesh(cp=world_size)["cp"], []
    comm.clear_log()
    with ExitStack() as watched:
        for place, name in ((comm, "isend"), (comm, "send"), (comm, "recv"), (comm.Handle, "wait")):
            watched.enter_context(noted(place, name, begun))
        mine = grads[rank].clone()
        got = answer(mine, window, axis)
    changed = not torch.equal(mine, grads[rank])
    late = rank == 1 and begun[:1] in (["wait"], ["recv"]) and not {"isend", "send"}.isdisjoint(begun)
    got = None if got is None else got.clone()
    return got, sum(size for _, size, _ in comm.traffic().values()), late, changed


def smallest_shard(answer) -> None:
    """Exercise: whether a causal window needs only the direct neighbour, exactly."""
    for tokens, ranks, window in itertools.product((7, 12, 16), (2, 3, 4), range(1, 9)):
        want = hops(layout("contiguous", tokens, ranks), window) <= 1
        got = returned(answer(layout("contiguous", tokens, ranks).sizes, window))
        sizes = layout("contiguous", tokens, ranks).sizes
        wrongly = "forbidden, though one hop is enough" if want else "allowed, though it needs a second hop"
        if want and sizes[-1] < window <= min(sizes[:-1]):
            wrongly += ": the last shard lends nothing"
        assert bool(got) == want, f"window {window} on shards {sizes} is {wrongly}"
    for sizes in ((6, 2, 4, 1), (1, 5, 5), (5, 1, 1, 6)):
        for window in range(1, 7):
            _one_hop(answer, sizes, window)
    by_chance(lambda chance: _one_hop(answer, *_shards(chance)))


def _shards(chance) -> tuple[tuple[int, ...], int]:
    """Unequal shards, the largest first, and a window that may just be one hop."""
    sizes = tuple(sorted((chance.randint(1, 30) for _ in range(chance.randint(1, 8))), reverse=True))
    return sizes, max(1, sizes[-2 if len(sizes) > 1 else 0] + chance.randint(-1, 1))


def _one_hop(answer, sizes: tuple[int, ...], window: int) -> None:
    what = f"unequal shards {sizes}, window {window}"
    want = all(n >= min(window, sum(sizes[: r + 1])) for r, n in enumerate(sizes[:-1]))
    assert bool(returned(called(answer, (sizes, window), what), what)) == want, (
        f"{what}: one hop is {'' if want else 'not '}enough. Look at each"
    )
