"""Ring attention: keys and values are sent around the ring while each rank attends to the block that it holds.

No rank ever holds more than two blocks. Liu, Zaharia & Abbeel 2023, "Ring Attention with Blockwise
Transformers", section 3; causal skipping after Li et al. 2023 (LightSeq) and Brandon et al. 2023 (Striped
Attention); double ring after Gu et al. 2024 (LoongTrain).
"""

import torch

from ...ranks import comm, trace
from .attention import block_backward, block_forward
from .borrow import Share
from .layouts import lenders
from .paths import RingPath, reach, ring_path


class Trip:
    """One trip of all blocks along a path, step by step; `held` is the block (2, B, H, S, D) here now, or None."""

    def __init__(self, block, share: Share, way: RingPath):
        self.share, self.axis, self.sizes, self.path = share, share.axis, share.table.sizes, way
        self.reach = reach(share.table, share.window, way)
        self.lenders = lenders(share.table, share.window)[share.axis.rank]
        self.block, self.held, self.step = block, block, 0

    @property
    def source(self) -> int:
        """Whose block is due here at this step."""
        return self.path.source(self.axis.rank, self.step)

    @property
    def needed(self) -> bool:
        """Whether a query of this rank sees a key of the block; the own block always comes first."""
        return self.step == 0 or self.source in self.lenders

    @property
    def options(self) -> tuple:
        """The positions of the queries and of the current keys, the window and the tile."""
        return self.share.mine, self.share.table.positions[self.source], self.share.window, self.share.tile

    def start_next(self) -> None:
        """Start sending the current block and receiving the next one; both continue while this rank computes."""
        following = self.path.source(self.axis.rank, self.step + 1)
        to, origin = self.path.at(self.source, self.step + 1), self.path.at(following, self.step)
        goes = self.reach[self.source] > self.step
        comes = self.reach[following] > self.step and self.step < self.axis.size - 1
        shape = (*self.block.shape[:-2], self.sizes[following], self.block.size(-1))
        self._going = comm.isend(self.held, self.axis, to) if goes else None
        self._coming = comm.irecv(self.block.new_empty(shape), self.axis, origin) if comes else None

    def finish_step(self) -> None:
        """Wait for the exchange; the next block is then the held one, or None where none was needed."""
        with trace.span("wait", kind="wait"):
            if self._going:
                self._going.wait()
            self.held = self._coming.wait() if self._coming else None
        self.step += 1


class _RingAttention(torch.autograd.Function):
    """Forward: a trip of k, v. Backward: a second trip of k, v, with their gradients one step behind."""

    @staticmethod
    def forward(ctx, q, k, v, share, way):
        trip, state = Trip(torch.stack((k, v)), share, way), None
        for _ in range(share.axis.size):
            trip.start_next()
            if trip.needed:
                state = block_forward(state, q, *trip.held, *trip.options)
            trip.finish_step()
        ctx.share, ctx.path = share, way
        ctx.save_for_backward(q, k, v, *state)
        return state[0]

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        axis, way, kv = ctx.share.axis, ctx.path, torch.stack((k, v))
        trip, sending = Trip(kv, ctx.share, way), []
        dq, home = torch.zeros_like(q), torch.zeros_like(kv)
        for step in range(axis.size):
            # a block's gradient starts at the first rank that borrows it and follows the block, one step behind
            source, held = trip.source, trip.held
            follows = step > 1 and held is not None
            gradient = comm.irecv(held, axis, way.at(source, step - 1)) if follows else None
            trip.start_next()
            part = torch.zeros_like(kv if held is None else held)
            if trip.needed:
                more, *part = block_backward(grad, out, lse, q, *held, *trip.options)
                dq, part = dq + more, torch.stack(part)
            if follows:
                with trace.span("wait", kind="wait"):
                    part = part + gradient.wait()
            if step == 0:
                home = part
            elif held is not None:
                to = source if trip.reach[source] == step else way.at(source, step + 1)
                sending.append(comm.isend(part, axis, to))
            trip.finish_step()
            if 0 < step == trip.reach[axis.rank]:  # the own block's gradient is sent back
                returning = comm.irecv(home, axis, way.at(axis.rank, step))
        with trace.span("wait", kind="wait"):
            if trip.reach[axis.rank]:
                home = home + returning.wait()
            for handle in sending:
                handle.wait()
        return dq, *home, None, None


def ring(q, k, v, share: Share):
    """Attend to the blocks of all ranks as they pass by; blocks that a rank does not need are passed on, not computed.

    Forward: each block makes `reach` hops, N-1 at most, sent while the block before is computed: c_s bytes a hop.
    Backward: the same hops again for k, v, and as many for their gradients, the last one straight to the owner.
    """
    return _RingAttention.apply(q, k, v, share, ring_path("ring", share.axis.size))


def double_ring(q, k, v, share: Share):
    """The ring in which all ranks of a machine send to the next machine at once, after a round among themselves.

    As many bytes as the ring where every rank needs every block. Of the hops, N (N/n - 1) leave a machine of n ranks,
    spread over all its ranks, instead of N/n (N - 1) that all leave from one of them.
    """
    return _RingAttention.apply(q, k, v, share, ring_path("double-ring", share.axis.size))
