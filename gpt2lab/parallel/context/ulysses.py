"""Heads for tokens and back: all-to-all turns a rank's tokens of all heads into all tokens of a rank's heads.

Jacobs et al. 2023, "DeepSpeed Ulysses", section 3; the `shard_heads` of anemoi.
"""

import torch

from ...ranks import comm
from .attention import block_attention
from .borrow import Share


def heads(q, k, v, share: Share):
    """Attend with H/N heads over the whole sequence; work is equal whatever the layout, and no key is borrowed.

    Forward: an all-to-all of q, k, v and one of the output: 3 + 1 shards, of which (N-1)/N leave the rank.
    Backward: the same two in reverse. Bytes per rank: 4 (N-1)/N^2 B T C numbers in each direction.
    """
    table, axis = share.table, share.axis
    batch, width, own = q.size(0), q.size(1) // axis.size, len(share.mine)
    parts = [p.contiguous() for p in torch.stack((q, k, v)).split(width, 2)]
    shapes = [(3, batch, width, size, q.size(-1)) for size in table.sizes]
    whole = torch.cat(comm.all_to_all(parts, axis, shapes), -2)  # (3, B, H/N, T, D), rank after rank
    if not table.in_order:
        whole = whole.index_select(-2, torch.tensor(table.inverse).to(q.device))
    everyone = range(table.tokens)
    y = block_attention(*whole, everyone, everyone, share.window, share.tile)
    if not table.in_order:
        y = y.index_select(-2, torch.tensor(table.order).to(q.device))
    parts = [p.contiguous() for p in y.split(table.sizes, -2)]
    return torch.cat(comm.all_to_all(parts, axis, [(batch, width, own, q.size(-1))] * axis.size), 1)
