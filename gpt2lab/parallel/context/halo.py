"""Halos: with windowed attention a rank needs only the few tokens next to its own slice, not the whole sequence.

`halo_exchange` borrows them from the neighbours, and `remove_halos` cuts them off again. How many they are says
`layouts.widths`: none in front of the first slice.
"""

import torch

from .attention import block_attention
from .borrow import WAYS, Share, borrow, moved_by, rows_here
from .layouts import loans, widths


def add_halos(x, before: int, after: int, dim: int = -2):
    """x with `before` rows of zeros in front of it along dim and `after` behind."""
    room = lambda n: x.new_zeros(*x.shape[: dim % x.dim()], n, *x.shape[dim % x.dim() + 1 :])
    return torch.cat([room(before), x, room(after)], dim)


def remove_halos(x, before: int, after: int, dim: int = -2):
    """The own rows of x: undoes `add_halos`."""
    return x.narrow(dim, before, x.size(dim) - before - after)


def halo_exchange(x, share: Share, before: int, after: int = 0, dim: int = -2, way: str = "alltoall"):
    """This rank's rows of x along dim with its halos around them; at the ends of the sequence the halos are shorter.

    Forward: each rank sends its last `before` rows to the next rank (and its first `after` to the one before).
    Backward: the halos' gradients are sent back and added. Bytes per rank: before + after rows each way, whatever N
    and T are; `allgather` sends those of all ranks but one. Raises ValueError, with the ways, for an unknown way.
    """
    if way not in WAYS:
        raise ValueError(f"There is no exchange of halos called {way!r}. Use one of {', '.join(WAYS)}.")
    lent = loans(share.table, before, after)
    return borrow(x.movedim(dim, -2), share, lent, *moved_by(WAYS[way]))[0].movedim(-2, dim)


def halo_x(q, k, v, share: Share):
    """Windowed attention after the layer's *input* was exchanged: q, k, v come with the halo, its queries are dropped.

    One row a halo token instead of two, but its q, k, v are computed twice, and the borrower's part of c_attn's
    gradient reaches the others by the gradient sum over the ranks.
    """
    q = remove_halos(q, widths(share.table, share.axis.rank, share.window)[0], 0)
    _, keys, _ = rows_here(share.table, share.axis.rank, loans(share.table, share.window))
    return block_attention(q, k, v, share.mine, keys, share.window, share.tile)
