"""Ring attention: keys and values travel round the ring while each rank attends to the block it holds.

No rank ever holds more than two blocks. Liu, Zaharia & Abbeel 2023, "Ring Attention with Blockwise
Transformers", section 3; causal skipping after Li et al. 2023 (LightSeq) and Brandon et al. 2023 (Striped
Attention).
"""

import torch

from ..ranks import comm
from .blockwise import block_backward, block_forward
from .gathering import Share
from .layouts import lenders, reach


class _Trip:
    """One trip round the ring, step by step; `held` is the block (2, B, H, S, D) that is here now, or None."""

    def __init__(self, block, share: Share):
        self.share, self.axis, self.sizes = share, share.axis, share.table.sizes
        self.reach = reach(share.table, share.window)
        self.lenders = lenders(share.table, share.window)[share.axis.rank]
        self.block, self.held, self.step = block, block, 0

    @property
    def source(self) -> int:
        """Whose block is due here at this step."""
        return (self.axis.rank - self.step) % self.axis.size

    @property
    def needed(self) -> bool:
        """Whether a query of this rank sees a key of the block; the own block always comes first."""
        return self.step == 0 or self.source in self.lenders

    @property
    def options(self) -> tuple:
        """Where the queries and the keys at hand stand, the window and the tile."""
        return self.share.mine, self.share.table.positions[self.source], self.share.window, self.share.tile

    def start_next(self) -> None:
        """Pass the held block on, and start receiving the next one; both go on while this rank computes."""
        behind, n = (self.source - 1) % self.axis.size, self.axis.size
        goes = self.reach[self.source] > self.step
        comes = self.reach[behind] > self.step and self.step < n - 1
        shape = (*self.block.shape[:-2], self.sizes[behind], self.block.size(-1))
        self._going = comm.isend(self.held, self.axis, (self.axis.rank + 1) % n) if goes else None
        self._coming = (
            comm.irecv(self.block.new_empty(shape), self.axis, (self.axis.rank - 1) % n) if comes else None
        )

    def finish_step(self) -> None:
        """Wait for the exchange; the next block is then the held one, or None where none was needed."""
        if self._going:
            self._going.wait()
        self.held = self._coming.wait() if self._coming else None
        self.step += 1


class _RingAttention(torch.autograd.Function):
    """Forward: a trip of k, v. Backward: a second trip of k, v, with their gradients one step behind."""

    @staticmethod
    def forward(ctx, q, k, v, share):
        kv = torch.stack((k, v))
        trip, state = _Trip(kv, share), None
        for _ in range(share.axis.size):
            trip.start_next()
            if trip.needed:
                state = block_forward(state, q, *trip.held, *trip.options)
            trip.finish_step()
        ctx.share = share
        ctx.save_for_backward(q, k, v, *state)
        return state[0]

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        rank, size = ctx.share.axis.rank, ctx.share.axis.size
        delta, kv = (grad * out).sum(-1, keepdim=True), torch.stack((k, v))
        trip, sending = _Trip(kv, ctx.share), []
        dq, home = torch.zeros_like(q), torch.zeros_like(kv)
        for step in range(size):
            # a block's gradient starts at the first rank that borrows it and follows the block, one step behind
            follows = step > 1 and trip.held is not None
            gradient = comm.irecv(trip.held, trip.axis, (rank - 1) % size) if follows else None
            trip.start_next()
            part = torch.zeros_like(kv if trip.held is None else trip.held)
            if trip.needed:
                more, *part = block_backward(grad, delta, lse, q, *trip.held, *trip.options)
                dq, part = dq + more, torch.stack(part)
            part = part + gradient.wait() if follows else part
            if step == 0:
                home = part
            elif trip.held is not None:
                to = trip.source if trip.reach[trip.source] == step else (rank + 1) % size
                sending.append(comm.isend(part, trip.axis, to))
            trip.finish_step()
        if trip.reach[rank]:
            home = home + comm.irecv(home, trip.axis, (rank + trip.reach[rank]) % size).wait()
        for handle in sending:
            handle.wait()
        return dq, *home, None


def ring(q, k, v, share: Share):
    """Attend to the blocks of all ranks as they pass by; blocks that a rank does not need are passed on, not computed.

    Forward: each block makes `reach` hops, N-1 at most, sent while the block before is computed: c_s bytes a hop.
    Backward: the same hops again for k, v, and as many for their gradients, the last one straight to the owner.
    """
    return _RingAttention.apply(q, k, v, share)
