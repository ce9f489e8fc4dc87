"""Checkers of lessons 10 and 11: owners, merging softmax blocks, contributors, halos and their adjoint."""

import itertools

import torch

from . import close


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
        got = answer(*blocks[0], *blocks[1])
        assert got is not None, "your function returned None. Is the return missing?"
        out, lse = got
        words = "merged output" + (" of huge scores (does exp overflow?)" if scale > 1 else "")
        close(out, scores.softmax(-1) @ values, words)
        close(lse, scores.logsumexp(-1, keepdim=True), "merged log-sum-exp")


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


def to_heads(answer) -> None:
    """Exercise: which part of a rank's (T/N, H, D) tensor goes to which peer, and how arrivals are joined."""
    tokens, heads, ranks = 8, 4, 2
    whole = torch.arange(tokens * heads, dtype=torch.float64).reshape(tokens, heads, 1)
    sent = [answer[0](shard, ranks) for shard in whole.split(tokens // ranks)]
    assert None not in sent, "your function returned None. Is the return missing?"
    for rank in range(ranks):
        got = answer[1]([parts[rank] for parts in sent])
        want = whole[:, rank * heads // ranks : (rank + 1) * heads // ranks]
        assert tuple(got.shape) == tuple(want.shape), (
            f"rank {rank} should hold {tuple(want.shape)}, all tokens of its heads, not {tuple(got.shape)}"
        )
        close(got, want, f"rank {rank}'s heads")


def give_back(answer) -> None:
    """Exercise: the adjoint of a causal halo of `window` rows, all ranks' shards at once in a list."""
    generator = torch.Generator().manual_seed(0)
    for sizes, window in (((4, 4, 4), 2), ((5, 3, 2), 3)):
        shards = [torch.randn(n, 2, dtype=torch.float64, generator=generator) for n in sizes]
        wide = [torch.cat([a[len(a) - window :], b]) for a, b in itertools.pairwise(shards)]
        wide = [shards[0], *wide]
        grads = [torch.randn(w.shape, dtype=torch.float64, generator=generator) for w in wide]
        got = answer([g.clone() for g in grads], window)
        assert got is not None, "your function returned None. Is the return missing?"
        shapes = [tuple(g.shape) for g in got]
        assert shapes == [tuple(s.shape) for s in shards], (
            f"own rows only: shapes should be {[tuple(s.shape) for s in shards]}, not {shapes}"
        )
        there = sum((w * g).sum() for w, g in zip(wide, grads, strict=True))
        back = sum((s * g).sum() for s, g in zip(shards, got, strict=True))
        close(back, there, "<x, H'y> against <Hx, y>: lent rows have two gradients, add them")


def smallest_shard(answer) -> None:
    """Exercise: whether a causal window needs only the direct neighbour, exactly."""
    from ...parallel.context.layouts import hops, layout

    for tokens, ranks, window in itertools.product((7, 12, 16), (2, 3, 4), range(1, 9)):
        want = hops(layout("contiguous", tokens, ranks), window) <= 1
        got = answer(layout("contiguous", tokens, ranks).sizes, window)
        assert got is not None, "your function returned None. Is the return missing?"
        sizes = layout("contiguous", tokens, ranks).sizes
        wrongly = "forbidden, though one hop is enough" if want else "allowed, though it needs a second hop"
        assert bool(got) == want, f"window {window} on shards {sizes} is {wrongly}"
