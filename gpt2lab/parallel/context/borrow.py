"""Borrowed rows: the others' tokens that attention sees are lent to a rank, and given back as gradients.

An exchange is a table of loans (of `layouts`: who lends which rows to whom; all ranks know it), a way to fetch them,
and a way to give their gradients back. Backward is the table with source and target swapped, and the owner *adds* what
comes.

S is the bytes of all keys and values of the sequence together, c_r those of rank r's tokens. The all-gather is that of
BSC's port of llm.c to many nodes (wiki page "Various informations"); halos after the sequence sharding proposed for
anemoi (anemoi-core, pull request 67).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from ...ranks import comm, trace
from ...ranks.mesh import Axis
from .attention import block_attention
from .layouts import Loan, TokenLayout, everyone


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


# Ways to move lent rows {loan: (..., n, D)} to their targets; `like` is any tensor (..., t, D) of the same kind


def send_recv(loans, lent: dict, like, axis) -> dict:
    """Blocking send and receive in the one order that all ranks share, even sources first. Messages: one a loan."""
    got = {}
    for a in loans:
        if a.source == axis.rank:
            comm.send(lent[a], axis, a.target)
        elif a.target == axis.rank:
            got[a] = comm.recv(_empty(like, a.stop - a.start), axis, a.source)
    return got


def isend_irecv(loans, lent: dict, like, axis) -> dict:
    """All sends and receives at once, then wait. Messages: one a loan."""
    sending = [comm.isend(lent[a], axis, a.target) for a in loans if a.source == axis.rank]
    coming = {
        a: comm.irecv(_empty(like, a.stop - a.start), axis, a.source) for a in loans if a.target == axis.rank
    }
    got = {a: handle.wait() for a, handle in coming.items()}
    for handle in sending:
        handle.wait()
    return got


def all_gather(loans, lent: dict, like, axis) -> dict:
    """All ranks' lent rows to all ranks, then pick: N-1 times as many bytes, but a single call."""
    by_source = sorted(loans, key=lambda a: (a.source, a.target))
    sizes = [sum(a.stop - a.start for a in loans if a.source == r) for r in range(axis.size)]
    mine = torch.cat([_empty(like, 0), *(lent[a] for a in by_source if a.source == axis.rank)], -2)
    pieces = comm.all_gather(mine, axis, -2, sizes).split([a.stop - a.start for a in by_source], -2)
    return {a: piece for a, piece in zip(by_source, pieces, strict=True) if a.target == axis.rank}


def all_to_all(loans, lent: dict, like, axis) -> dict:
    """One all-to-all in which only neighbours exchange something: anemoi's choice after measuring all four."""
    going = {a.target: rows for a, rows in lent.items()}
    coming = {a.source: a for a in loans if a.target == axis.rank}
    parts = [going.get(p, _empty(like, 0)) for p in range(axis.size)]
    counts = [coming[p].stop - coming[p].start if p in coming else 0 for p in range(axis.size)]
    got = comm.all_to_all(parts, axis, [tuple(_empty(like, n).shape) for n in counts])
    return {a: got[p] for p, a in coming.items()}


WAYS = {"sendrecv": send_recv, "isend": isend_irecv, "allgather": all_gather, "alltoall": all_to_all}


def _empty(like, rows: int):
    return like.new_empty(*like.shape[:-2], rows, like.size(-1))


# Fetch: (own rows, share, loans) -> the rows by rank, the own ones too, None of a rank that lends nothing here


def gather(rows, share: Share, loans=()) -> list:
    """All ranks' rows (..., T, D) by rank, from an all-gather. Bytes per rank: S - c_(r+1)."""
    return list(comm.all_gather(rows, share.axis, -2, share.table.sizes).split(share.table.sizes, -2))


def lend_by(way, rows, share: Share, loans) -> list:
    """The lent rows by rank: each rank sends by `way` to those that borrow. Bytes per rank: those of the rows it lends.

    Of the loans `seen`: c_r for every other rank that attends to a token of r; of halos: `before` + `after` rows.
    """
    me, parts = share.axis.rank, [None] * share.table.ranks
    lent = {a: rows[..., a.start : a.stop, :].contiguous() for a in loans if a.source == me}
    for a, borrowed in way(loans, lent, rows, share.axis).items():
        parts[a.source] = borrowed
    parts[me] = rows
    return parts


# Give back: (gradients of all rows here by rank, share, loans) -> the gradient of the own rows


def return_by(way, parts: list, share: Share, loans):
    """Send the gradients of borrowed rows to their owners, who add them up: the loans of `lend_by`, turned round."""
    me, own = share.axis.rank, parts[share.axis.rank].clone()
    turned = [Loan(a.target, a.source, a.start, a.stop) for a in loans]
    borrowed = {a: parts[a.target] for a in turned if a.source == me}
    for a, gradient in way(turned, borrowed, own, share.axis).items():
        own[..., a.start : a.stop, :] += gradient
    return own


def by_all_reduce(parts: list, share: Share, loans=()):
    """Sum the gradients of all rows on every rank, keep the own slice. Bytes per rank: 2 (N-1)/N S."""
    whole = comm.all_reduce(torch.cat(parts, -2), share.axis)
    return whole.split(share.table.sizes, -2)[share.axis.rank]


def by_reduce_scatter(parts: list, share: Share, loans=()):
    """Sum the gradients of all rows, each on the rank that owns it. Bytes per rank: S - c_r."""
    return comm.reduce_scatter(torch.cat(parts, -2), share.axis, -2, share.table.sizes)


def by_roots(parts: list, share: Share, loans=()):
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


class _Borrow(torch.autograd.Function):
    """Own and borrowed rows in the order of their positions; backward sends each row's gradient to its owner."""

    @staticmethod
    def forward(ctx, rows, share, loans, fetch, give_back):
        with trace.span("wait", kind="wait"):
            parts = fetch(rows, share, loans)
        ctx.rest, (here, _, order) = (share, loans, give_back), rows_here(share.table, share.axis.rank, loans)
        joined = torch.cat([parts[a.source] for a in here], -2)
        return joined if order is None else joined.index_select(-2, torch.tensor(order).to(joined.device))

    @staticmethod
    def backward(ctx, grad):
        share, loans, give_back = ctx.rest
        here, _, order = rows_here(share.table, share.axis.rank, loans)
        if order is not None:
            grad = grad.index_select(-2, torch.argsort(torch.tensor(order)).to(grad.device))
        parts = [None] * share.table.ranks
        for a, part in zip(here, grad.split([a.stop - a.start for a in here], -2), strict=True):
            parts[a.source] = part.contiguous()
        with trace.span("wait", kind="wait"):
            return give_back(parts, share, loans), None, None, None, None


@lru_cache(maxsize=256)
def rows_here(table: TokenLayout, rank: int, loans: tuple[Loan, ...]) -> tuple:
    """What a rank has, its own rows too: loans by source, positions (ascending), and the indirection table.

    The table says which row holds the first position, the second, ...; None: the rows are in order already.
    """
    own = Loan(rank, rank, 0, table.sizes[rank])
    here = sorted([own, *(a for a in loans if a.target == rank)], key=lambda a: a.source)
    rows = [t for a in here for t in table.positions[a.source][a.start : a.stop]]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return here, sorted(rows), None if rows == sorted(rows) else order


def borrow(rows, share: Share, loans, fetch, give_back):
    """Rows (..., t, D) of this rank's tokens and of those that it borrows, and their positions, ascending."""
    positions = rows_here(share.table, share.axis.rank, loans)[1]
    return _Borrow.apply(rows, share, loans, fetch, give_back), positions


def moved_by(way) -> tuple[Callable, Callable]:
    """How rows are fetched and given back where the same way carries both."""
    return partial(lend_by, way), partial(return_by, way)


def borrowing(table_of_loans, fetch, give_back):
    """An exchange that borrows keys and values, two thirds of what the source's all-gather of q, k, v sends."""

    def attend(q, k, v, share: Share):
        loans = table_of_loans(share.table, share.window)
        kv, keys = borrow(torch.stack((k, v)), share, loans, fetch, give_back)
        return block_attention(q, *kv, share.mine, keys, share.window, share.tile)

    return attend


def gather_qkv(q, k, v, share: Share):
    """As in the BSC port: all-gather q, k and v, though no other rank reads q; all-reduce all three gradients.

    Forward: all-gather, 3/2 (S - c_(r+1)) bytes per rank. Backward: all-reduce, 3/2 times 2 (N-1)/N S.
    """
    qkv, keys = borrow(torch.stack((q, k, v)), share, everyone(share.table), gather, by_all_reduce)
    own = qkv[0].index_select(-2, torch.tensor(share.mine, dtype=torch.long).to(q.device))
    return block_attention(own, qkv[1], qkv[2], share.mine, keys, share.window, share.tile)
