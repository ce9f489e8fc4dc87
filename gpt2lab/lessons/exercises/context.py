"""Checkers of lessons 10 and 11: owners, merging softmax blocks, contributors, halos and their adjoint."""

import itertools

import torch

from . import close, live, returned, scored


def owner(answer) -> None:
    """Exercise: the rank that owns a token in an interleaved and in a zigzag layout."""
    from ...parallel.context.layouts import layout

    for name, tokens, ranks in (
        ("interleaved", 12, 3),
        ("zigzag", 12, 3),
        ("zigzag", 16, 2),
        ("interleaved", 7, 4),
    ):
        want = layout(name, tokens, ranks).owners
        got = tuple(answer(t, tokens, ranks, name) for t in range(tokens))
        assert None not in got, "your function returned None. Is the return missing?"
        assert max(got) < ranks, (
            f"{name}: token {got.index(max(got))} went to rank {max(got)} of only {ranks}"
        )
        assert got == want, f"{name}, {tokens} tokens on {ranks} ranks: owners should be {want}, not {got}"


def merge(answer) -> None:
    """Exercise: two blocks of attention become one."""
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 300.0):
        scores = scale * torch.randn(3, 7, dtype=torch.float64, generator=generator)
        values = torch.randn(7, 2, dtype=torch.float64, generator=generator)
        blocks = [
            (s.softmax(-1) @ v, s.logsumexp(-1, keepdim=True))
            for s, v in zip(scores.split((2, 5), -1), values.split((2, 5)), strict=True)
        ]
        got = returned(answer(*blocks[0], *blocks[1]))
        out, lse = got
        words = "merged output" + (" of huge scores (does exp overflow?)" if scale > 1 else "")
        close(out, scores.softmax(-1) @ values, words)
        close(lse, scores.logsumexp(-1, keepdim=True), "merged log-sum-exp")
    _merge_rows(answer)


def _merge_rows(answer) -> None:
    """Rows whose scores differ much in size, and rows of which one block is hidden altogether."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(4, 7, dtype=torch.float64, generator=generator)
    values = torch.randn(7, 2, dtype=torch.float64, generator=generator)
    scores += torch.tensor([0.0, 2000.0, -2000.0, 0.0])[:, None]
    for hidden, words in (
        (None, "rows of scores near 0, 2000 and -2000: each row needs a maximum of its own"),
        (2, ""),
    ):
        seen = scores.clone()
        if hidden:
            seen[0, :hidden] = seen[3, hidden:] = -torch.inf
            words = "a row of which one block sees no key (L = -inf, o = 0) is the other block's"
        blocks = []
        for s, v in zip(seen.split((2, 5), -1), values.split((2, 5)), strict=True):
            blocks += [s.softmax(-1).nan_to_num(0.0) @ v, s.logsumexp(-1, keepdim=True)]
        out, lse = answer(*blocks)
        close(out, seen.softmax(-1) @ values, words)
        close(lse, seen.logsumexp(-1, keepdim=True), f"log-sum-exp, {words}")


def ring_backward(answer) -> None:
    """Exercise: the backward of ring attention on three live ranks; k, v and their gradients go round."""
    q, k, v, grad = (x.requires_grad_() for x in _sequence())
    _attend(q, k, v)[0].backward(grad.detach())
    found = live(_backward_on_a_rank, answer, ranks=3, what="three live ranks")
    best = 3 * 4 * 4 * 5 * 8  # three shifts of k, v, dk, dv (4, 5)
    for rank, (given, _, _) in enumerate(found):
        returned(given)
        for name, got, want in zip(("dq", "dk", "dv"), given, (q.grad, k.grad, v.grad), strict=True):
            close(got, want[4 * rank :][:4], f"{name} on rank {rank}", 1e-9)
    calls = [sum(of_one[op] for _, _, of_one in found) for op in ("send", "recv")]
    for rank, (_, sent, _) in enumerate(found):
        assert set(sent) <= {"send", "recv"}, (
            f"rank {rank} called {sorted(sent)}: on a ring only neighbours talk"
        )
        assert sum(sent.values()) <= best, (
            f"rank {rank} sent {sum(sent.values())} bytes; k, v and two gradients once round are {best}"
        )
    assert calls[0] == calls[1], (
        f"{calls[1]} messages were received, and {calls[0]} sends were waited for: what has not left may still change"
    )


def _sequence():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(12, 5, dtype=torch.float64, generator=generator) for _ in range(4)]


def _attend(q, k, v):
    scores = (q @ k.T / 5**0.5).masked_fill(torch.ones(12, 12).triu(1) > 0, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


def _backward_on_a_rank(rank, world_size, answer):
    from ...ranks import comm
    from ...ranks.mesh import Mesh

    axis, (q, k, v, grad) = Mesh(cp=world_size)["cp"], _sequence()
    sent, calls = {}, {"send": 0, "recv": 0}
    out, lse = _attend(q, k, v)
    mine = [x[4 * rank :][:4].clone() for x in (q, k, v, out, lse, grad)]
    comm.clear_log()
    given = answer(*mine, axis)
    for (op, _), (count, size, _) in comm.traffic().items():
        sent[op], calls[op] = size, count
    return given, sent, calls


def contributors(answer) -> None:
    """Exercise: which ranks contribute to the key gradients of a root, in a contiguous split."""
    for ranks in (2, 4):
        for root in range(ranks):
            got = sorted(answer(root, ranks))
            assert root in got, f"root {root} of {ranks}: its own queries see its own keys"
            assert got == list(range(root, ranks)), (
                f"root {root} of {ranks}: expected ranks {root} to {ranks - 1}, got {got}"
            )


def imbalance(answer) -> None:
    """Exercise: the busiest rank over the mean, of attention on contiguous slices."""
    close(answer(8, 1), 1, "one rank is balanced by itself")
    close(answer(4, 2), (7 / 5), "4 tokens on 2 ranks: rows cost 1, 2, 3, 4")
    close(answer(16, 4), (13 + 14 + 15 + 16) / 34, "16 tokens on 4 ranks")


def spread(answer) -> str:
    """Puzzle: 12 blocks of 8 tokens, three for each of 4 ranks; the score is the busiest rank's pairs."""
    from ...parallel.context import costs
    from ...parallel.context.layouts import TokenLayout

    found = _shared_out(answer(), 4, 3, "block", "the ranks' MLPs")
    tokens = tuple(tuple(8 * b + i for b in sorted(mine) for i in range(8)) for mine in found)
    table = TokenLayout("yours", tokens)
    return scored(max(costs.pairs(table, r) for r in range(4)), "pairs", bar=1260, best=1196)


def _shared_out(found, ranks: int, each: int, thing: str, who: str):
    """Lists of twelve things, equally many for each rank and each thing once; AssertionError where they are not."""
    say = {3: "three", 4: "four"}
    returned(found)
    assert len(found) == ranks and all(isinstance(mine, list | tuple) for mine in found), (
        f"{say[ranks]} lists, one a rank, with {say[each]} {thing}s in each; not {found}"
    )
    things = [x for mine in found for x in mine]
    for x in things:
        assert x in range(12), f"{thing} {x} is none of 0 to 11"
        assert things.count(x) == 1, f"{thing} {x} has {things.count(x)} owners"
    counts = [len(mine) for mine in found]
    assert counts == [each] * ranks, (
        f"{say[each]} {thing}s a rank, and here are {counts}: {who} would not be balanced"
    )
    return found


def place(answer) -> str:
    """Puzzle: 12 points of a grid, four for each of 3 ranks; the score is the rows that ranks borrow."""
    from ..labs.context import wanted

    found = _shared_out(answer(), 3, 4, "point", "the ranks")
    rows = sum(len(points) for lists in wanted(found) for points in lists)
    return scored(rows, "rows borrowed", bar=12, best=11)


def to_heads(there, back) -> None:
    """Exercise: tokens for heads and back again, by all-to-all on live ranks, uneven tokens included."""
    for ranks, sizes in ((2, (4, 3)), (3, (3, 2, 2))):
        heads, what = 6, f"6 heads, {sizes} tokens on {ranks} ranks"
        whole = torch.arange(7 * heads * 5, dtype=torch.float64).reshape(7, heads, 5)
        found = live(_there_and_back, there, back, whole, sizes, ranks=ranks, what=what)
        for rank, (got, again, sent) in enumerate(found):
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
                sizes[rank] * heads * 5 * 8 * (ranks - 1) // ranks
                + (7 - sizes[rank]) * heads // ranks * 5 * 8
            )
            assert sent == leave, (
                f"{what}: rank {rank} sent {sent} bytes; what has to leave it there and back is {leave}"
            )


def _there_and_back(rank, world_size, there, back, whole, sizes):
    from ...ranks import comm
    from ...ranks.mesh import Mesh

    axis = Mesh(cp=world_size)["cp"]
    first = sum(sizes[:rank])
    comm.clear_log()
    got = there(whole[first : first + sizes[rank]].clone(), axis, sizes)
    right = whole[:, rank * whole.size(1) // world_size :][:, : whole.size(1) // world_size].clone()
    again = back(right, axis, sizes)
    return got, again, sum(size for _, size, _ in comm.traffic().values())


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
        got, sent = zip(*found, strict=True)
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


def _given_back(rank, world_size, answer, grads, window):
    from ...ranks import comm
    from ...ranks.mesh import Mesh

    axis = Mesh(cp=world_size)["cp"]
    comm.clear_log()
    got = answer(grads[rank].clone(), window, axis)
    return got, sum(size for _, size, _ in comm.traffic().values())


def smallest_shard(answer) -> None:
    """Exercise: whether a causal window needs only the direct neighbour, exactly."""
    from ...parallel.context.layouts import hops, layout

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
            want = all(n >= min(window, sum(sizes[: r + 1])) for r, n in enumerate(sizes[:-1]))
            assert bool(answer(sizes, window)) == want, (
                f"unequal shards {sizes}, window {window}: one hop is {'' if want else 'not '}enough. Look at each"
            )
