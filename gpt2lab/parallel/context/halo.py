"""Halos: with windowed attention a rank needs only the few tokens next to its own slice, not the whole sequence.

`halo_exchange` makes room with `add_halos` and fills it from the neighbours; `remove_halos` cuts it off again. How
much room says `layouts.widths`: none in front of the first slice. Backward adds the gradients of lent rows to their
owner's. After the sequence sharding proposed for anemoi (anemoi-core, pull request 67).
"""

import torch

from ...ranks import comm, trace
from .attention import block_attention
from .gather import Share
from .layouts import Loan, TokenLayout, loans, widths


def add_halos(x, before: int, after: int, dim: int = -2):
    """x with `before` rows of zeros in front of it along dim and `after` behind."""
    room = lambda n: x.new_zeros(*x.shape[: dim % x.dim()], n, *x.shape[dim % x.dim() + 1 :])
    return torch.cat([room(before), x, room(after)], dim)


def remove_halos(x, before: int, after: int, dim: int = -2):
    """The own rows of x: undoes `add_halos`."""
    return x.narrow(dim, before, x.size(dim) - before - after)


def send_recv(loans, rows: dict, empty, axis) -> dict:
    """Blocking send and receive in the one order that all ranks share, even sources first. Messages: one a loan."""
    got = {}
    for a in loans:
        if a.source == axis.rank:
            comm.send(rows[a], axis, a.target)
        elif a.target == axis.rank:
            got[a] = comm.recv(empty(a.stop - a.start), axis, a.source)
    return got


def isend_irecv(loans, rows: dict, empty, axis) -> dict:
    """All sends and receives at once, then wait. Messages: one a loan."""
    sending = [comm.isend(rows[a], axis, a.target) for a in loans if a.source == axis.rank]
    coming = {a: comm.irecv(empty(a.stop - a.start), axis, a.source) for a in loans if a.target == axis.rank}
    got = {a: handle.wait() for a, handle in coming.items()}
    for handle in sending:
        handle.wait()
    return got


def all_gather(loans, rows: dict, empty, axis) -> dict:
    """All ranks' lent rows to all ranks, then pick: N-1 times as many bytes, but a single call."""
    by_source = sorted(loans, key=lambda a: (a.source, a.target))
    sizes = [sum(a.stop - a.start for a in loans if a.source == r) for r in range(axis.size)]
    mine = torch.cat([empty(0)] + [rows[a] for a in by_source if a.source == axis.rank])
    pieces = comm.all_gather(mine, axis, 0, sizes).split([a.stop - a.start for a in by_source])
    return {a: piece for a, piece in zip(by_source, pieces, strict=True) if a.target == axis.rank}


def all_to_all(loans, rows: dict, empty, axis) -> dict:
    """One all-to-all in which only neighbours exchange something: anemoi's choice after measuring all four."""
    going = {a.target: rows[a] for a in loans if a.source == axis.rank}
    coming = {a.source: a for a in loans if a.target == axis.rank}
    parts = [going.get(p, empty(0)) for p in range(axis.size)]
    counts = [coming[p].stop - coming[p].start if p in coming else 0 for p in range(axis.size)]
    got = comm.all_to_all(parts, axis, [tuple(empty(n).shape) for n in counts])
    return {a: got[p] for p, a in coming.items()}


WAYS = {"sendrecv": send_recv, "isend": isend_irecv, "allgather": all_gather, "alltoall": all_to_all}


def _place(a: Loan, table: TokenLayout, ahead: int) -> slice:
    """The rows of a loan on the borrower, whose own rows begin after a halo of `ahead`."""
    start = ahead + table.positions[a.source][a.start] - table.positions[a.target][0]
    return slice(start, start + a.stop - a.start)


class _Halo(torch.autograd.Function):
    """Own rows with the neighbours' around them; backward gives the halo's gradient back, *added* to the owner's."""

    @staticmethod
    def forward(ctx, x, share, before, after, way):
        table, rank, flat = share.table, share.axis.rank, x.flatten(1)
        ctx.share, ctx.way, ctx.loans = share, WAYS[way], loans(table, before, after)
        ctx.room = widths(table, rank, before, after)
        lent = {a: flat[a.start : a.stop].contiguous() for a in ctx.loans if a.source == rank}
        with trace.span("wait", kind="wait"):
            got = ctx.way(ctx.loans, lent, lambda n: flat.new_empty(n, flat.size(1)), share.axis)
        wide = add_halos(flat, *ctx.room, dim=0)
        for a, rows in got.items():
            wide[_place(a, table, ctx.room[0])] = rows
        return wide.unflatten(1, x.shape[1:])

    @staticmethod
    def backward(ctx, grad):
        table, rank, flat = ctx.share.table, ctx.share.axis.rank, grad.flatten(1)
        back = {a: Loan(a.target, a.source, a.start, a.stop) for a in ctx.loans}
        halos = {
            back[a]: flat[_place(a, table, ctx.room[0])].contiguous() for a in ctx.loans if a.target == rank
        }
        with trace.span("wait", kind="wait"):
            got = ctx.way([*back.values()], halos, lambda n: flat.new_empty(n, flat.size(1)), ctx.share.axis)
        mine = remove_halos(flat, *ctx.room, dim=0).clone()
        for a, gradient in got.items():
            mine[a.start : a.stop] += gradient
        return mine.unflatten(1, grad.shape[1:]), None, None, None, None


def halo_exchange(x, share: Share, before: int, after: int = 0, dim: int = -2, way: str = "alltoall"):
    """This rank's rows of x along dim with its halos around them; at the ends of the sequence the halos are shorter.

    Forward: each rank sends its last `before` rows to the next rank (and its first `after` to the one before).
    Backward: the halos' gradients are sent back and added. Bytes per rank: before + after rows each way, whatever N
    and T are; `allgather` sends those of all ranks but one. Raises ValueError, with the ways, for an unknown way.
    """
    if way not in WAYS:
        raise ValueError(f"There is no exchange of halos called {way!r}. Use one of {', '.join(WAYS)}.")
    return _Halo.apply(x.movedim(dim, 0), share, before, after, way).movedim(0, dim)


def halo_kv(way: str):
    """Windowed attention that borrows keys and values: two rows a halo token, and nothing is computed twice."""

    def attend(q, k, v, share: Share):
        kv = halo_exchange(torch.stack((k, v)), share, share.window, way=way)
        return block_attention(q, *kv, share.mine, _keys(share), share.window, share.tile)

    return attend


def halo_x(q, k, v, share: Share):
    """Windowed attention after the layer's *input* was exchanged: q, k, v come with the halo, its queries are dropped.

    One row a halo token instead of two, but its q, k, v are computed twice, and the borrower's part of c_attn's
    gradient reaches the others by the gradient sum over the ranks.
    """
    q = remove_halos(q, widths(share.table, share.axis.rank, share.window)[0], 0)
    return block_attention(q, k, v, share.mine, _keys(share), share.window, share.tile)


def _keys(share: Share) -> list[int]:
    """Positions of the own tokens and of the halo in front of them."""
    mine = share.mine
    return [*range(max(0, mine[0] - share.window), mine[0]), *mine] if mine else []
