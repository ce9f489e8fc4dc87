"""Attention over borrowed keys and values: gathered, or sent to ranks that need them; their gradients are sent back.

A rank owns some tokens of a sequence, and its queries need keys that others own. S is the bytes of all keys and
values of the sequence together, c_r those of rank r's tokens. The all-gather is that of BSC's port of llm.c to many
nodes (wiki page "Various informations").
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...ranks import comm, trace
from ...ranks.mesh import Axis
from .attention import block_attention
from .layouts import TokenLayout, contributors, lenders


@dataclass(frozen=True)
class Share:
    """What an exchange knows: who owns which token, between which ranks, and what attention looks at.

    `roots[i]` is the axis of the ranks that contribute to rank i's gradients; None on a rank that does not.
    """

    table: TokenLayout
    axis: Axis
    window: int | None = None
    tile: int | None = None  # queries attended to at a time, by hand; None: torch's kernel where it can
    roots: tuple[Axis | None, ...] = ()

    @property
    def mine(self) -> tuple[int, ...]:
        """The positions of this rank's tokens."""
        return self.table.positions[self.axis.rank]


def gather(rows, share: Share) -> list:
    """All ranks' rows (..., T, D) by rank, from an all-gather. Bytes per rank: S - c_(r+1)."""
    return list(comm.all_gather(rows, share.axis, -2, share.table.sizes).split(share.table.sizes, -2))


def point_to_point(rows, share: Share) -> list:
    """The rows of the ranks whose keys this rank sees, None for the others: each rank sends to those that need it.

    Bytes per rank: c_r for every other rank that attends to a token of r: N-1-r of them in a contiguous layout.
    """
    axis, needs = share.axis, lenders(share.table, share.window)
    sending = [
        comm.isend(rows, axis, r) for r in range(axis.size) if r != axis.rank and axis.rank in needs[r]
    ]
    arriving = {
        s: comm.irecv(rows.new_empty(*rows.shape[:-2], share.table.sizes[s], rows.size(-1)), axis, s)
        for s in needs[axis.rank]
        if s != axis.rank
    }
    parts = [arriving[s].wait() if s in arriving else None for s in range(axis.size)]
    parts[axis.rank] = rows
    for handle in sending:
        handle.wait()
    return parts


def by_all_reduce(parts: list, share: Share):
    """Sum the gradients of all rows on every rank, keep the own slice. Bytes per rank: 2 (N-1)/N S."""
    whole = comm.all_reduce(torch.cat(parts, -2), share.axis)
    return whole.split(share.table.sizes, -2)[share.axis.rank]


def by_reduce_scatter(parts: list, share: Share):
    """Sum the gradients of all rows, each on the rank that owns it. Bytes per rank: S - c_r."""
    return comm.reduce_scatter(torch.cat(parts, -2), share.axis, -2, share.table.sizes)


def by_roots(parts: list, share: Share):
    """One reduce for every root, over the ranks that contribute to it, the root itself included.

    The BSC page would leave out the ranks <= root; but rank root's queries see its own keys, so in slices only
    those < root give zero. Bytes per rank: c_i for every other root i that r contributes to (in slices, i < r).
    """
    mine = parts[share.axis.rank]
    for root, (part, axis) in enumerate(zip(parts, share.roots, strict=True)):
        if axis is not None:
            total = comm.reduce(part, axis, axis.ranks.index(share.axis.ranks[root]))
            mine = total if root == share.axis.rank else mine
    return mine


def by_point_to_point(parts: list, share: Share):
    """Send every borrowed row's gradient to its owner, who adds them up: the mirror image of `point_to_point`."""
    axis, mine = share.axis, parts[share.axis.rank].clone()
    sending = [comm.isend(p, axis, s) for s, p in enumerate(parts) if p is not None and s != axis.rank]
    for r in contributors(share.table, axis.rank, share.window):
        if r != axis.rank:
            mine += comm.irecv(mine, axis, r).wait()
    for handle in sending:
        handle.wait()
    return mine


class _Borrow(torch.autograd.Function):
    """Rows of all lenders in the order of their positions; backward sends each row's gradient to its owner."""

    @staticmethod
    def forward(ctx, rows, share, fetch, give_back):
        with trace.span("wait", kind="wait"):
            parts = fetch(rows, share)
        ctx.share, ctx.give_back = share, give_back
        ctx.lenders = tuple(s for s, part in enumerate(parts) if part is not None)
        joined = torch.cat([parts[s] for s in ctx.lenders], -2)
        order = _sorting(share.table, ctx.lenders)
        return joined if order is None else joined.index_select(-2, torch.tensor(order).to(joined.device))

    @staticmethod
    def backward(ctx, grad):
        table, order = ctx.share.table, _sorting(ctx.share.table, ctx.lenders)
        if order is not None:
            grad = grad.index_select(-2, torch.argsort(torch.tensor(order)).to(grad.device))
        pieces = grad.split([table.sizes[s] for s in ctx.lenders], -2)
        lent = {s: piece.contiguous() for s, piece in zip(ctx.lenders, pieces, strict=True)}
        with trace.span("wait", kind="wait"):
            return ctx.give_back([lent.get(s) for s in range(table.ranks)], ctx.share), None, None, None


@lru_cache(maxsize=256)
def _sorting(table: TokenLayout, ranks: tuple[int, ...]) -> list[int] | None:
    """The indirection table: which borrowed row holds the first position, the second, ...; None: they are sorted."""
    positions = [t for s in ranks for t in table.positions[s]]
    order = sorted(range(len(positions)), key=positions.__getitem__)
    return None if positions == sorted(positions) else order


def borrow(rows, share: Share, fetch, give_back):
    """Rows (..., t, D) of this rank's tokens and of those it borrows, and their positions, ascending.

    Forward: `fetch` (gather or point_to_point). Backward: `give_back`, one of the four sums above.
    """
    everyone = fetch is gather
    ranks = range(share.table.ranks) if everyone else lenders(share.table, share.window)[share.axis.rank]
    return _Borrow.apply(rows, share, fetch, give_back), share.table.chunks({*ranks, share.axis.rank})


def borrowing(fetch, give_back):
    """An exchange that borrows keys and values, two thirds of what the source's all-gather of q, k, v sends."""

    def attend(q, k, v, share: Share):
        kv, keys = borrow(torch.stack((k, v)), share, fetch, give_back)
        return block_attention(q, *kv, share.mine, keys, share.window, share.tile)

    return attend


def gather_qkv(q, k, v, share: Share):
    """As in the BSC port: all-gather q, k and v, though no other rank reads q; all-reduce all three gradients.

    Forward: all-gather, 3/2 (S - c_(r+1)) bytes per rank. Backward: all-reduce, 3/2 times 2 (N-1)/N S.
    """
    qkv, keys = borrow(torch.stack((q, k, v)), share, gather, by_all_reduce)
    own = qkv[0].index_select(-2, torch.tensor(share.mine, dtype=torch.long).to(q.device))
    return block_attention(own, qkv[1], qkv[2], share.mine, keys, share.window, share.tile)
