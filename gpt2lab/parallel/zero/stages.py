"""ZeRO: replicas that share out what each of them would otherwise hold n times.

Stage 1 shards the optimizer state, stage 2 the gradients too, stage 3 the weights too. Per rank, with P elements of e
bytes, n ranks and AdamW (S = P e, each divided by n up to padding):

stage   weights   gradients   optimizer   sent a step
1       S         S           2 S / n     2 S (n-1)/n
2       S         S / n       2 S / n     2 S (n-1)/n    (with k micro-batches (k+1) S (n-1)/n)
3       S / n     S / n       2 S / n     3 S (n-1)/n    (with k micro-batches 3 k S (n-1)/n)

Parameters outside the blocks are gathered once, not twice: in stage 3 they send 2 where the blocks send 3.

With `shard` = n the ranks share in groups of n neighbours and the r groups are replicas of each other: "hybrid
sharding", HSDP. Then everything above stays inside a group, on its fast links, and each rank sends 2 (r-1)/r of its
shard's gradient, S / n bytes, to the ranks of the same place in other groups, once a step.

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", section 3.2.2;
Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 5 and 7.
"""

from dataclasses import replace
from functools import cached_property

import torch

from ...ranks import comm
from ...ranks.mesh import Axis
from ..base import on_gradient
from ..chunked_loss import ChunkedLoss
from ..data import Replicas, gradient
from ..finish import Piece, empty
from ..recompute import apply_recompute
from .flat import Flat, Refilled, into_groups, owner_of


class Zero1(Replicas):
    """Every rank keeps all weights and gradients, but steps only its shard of the weights.

    Forward: nothing. Backward: nothing; after it a reduce-scatter gives each rank its shard of the summed gradient.
    After the update an all-gather brings all ranks' new weights.
    Bytes per rank: (n-1)/n of the gradients' plus (n-1)/n of the weights' (section 7.1: together an all-reduce).
    """

    across: Axis | None = None  # the ranks of the same place in other groups, where only a group shares

    def __init__(self, model, axis: Axis, flat=Flat, experts: Axis | None = None):
        super().__init__(model, axis, experts)
        groups = [(g, self.axis_of(g[0][1])) for g in into_groups(model)]
        self.flats = [flat(g, a, owner_of(i, len(groups), a.size)) for i, (g, a) in enumerate(groups)]
        for f in self.flats:
            f.lay_out()

    @cached_property
    def pieces(self) -> list[Piece]:
        """What this rank's optimizer steps: parts of its shards."""
        found = [p for f in self.flats for p in f.pieces()] or [empty(self.unsharded[0])]
        return [replace(p, copies=self.across) for p in found]

    def finish(self) -> None:
        """Sum all gradients, part by part from the end; each rank keeps its shards."""
        for f in reversed(self.flats):
            whole = f.join([gradient(p) for p in f.parameters])
            for p in f.parameters:
                p.grad = None
            f.add(f.start_reduce(whole).wait())
        self._hand_out()

    def _hand_out(self) -> None:
        """Give every piece its part of the shard's gradient, and begin the next step with none."""
        if self.across is not None:
            for f in self.flats:
                f.grad = comm.all_reduce(f.grad, self.across, own=True)
        grads = [f.grad[here] for f in self.flats for _, _, here in f.shares()]
        for p, grad in zip(self.pieces, grads or [torch.zeros_like(self.pieces[0].tensor)], strict=True):
            p.tensor.grad = grad
        for f in self.flats:
            f.grad = None

    def weight_memory(self) -> list[torch.Tensor]:
        """The shards, padding included."""
        return [f.shard for f in self.flats]

    def updated(self) -> None:
        """Gather all ranks' new shards into the whole weights."""
        for f in self.flats:
            f.spread()

    def whole(self, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values that belong to the pieces, whole again, by name."""
        values, found = iter(values), {}
        for f in self.flats:
            found.update(zip(f.names, f.assemble(values), strict=True))
        return found


class Zero2(Zero1):
    """As stage 1, but a part's gradients are reduced as soon as backward has produced them, and then freed.

    Forward: nothing. Backward: when all gradients of a block are there, one asynchronous reduce-scatter; only the
    own shard stays. So gradients are summed in every micro-batch: keeping them whole until the last would give up
    the gain. Parts leave in the order in which backward completes them, the same on all ranks; where it is not, the
    call refuses. Bytes per rank: k (n-1)/n of the gradients' with k micro-batches, plus (n-1)/n of the weights'
    (section 7.2.1).
    """

    def __init__(self, model, axis: Axis, flat=Flat, experts: Axis | None = None):
        super().__init__(model, axis, flat, experts)
        self.under_way = None  # (part, handle) of a reduce-scatter
        for part, f in enumerate(self.flats):
            for i, p in enumerate(f.parameters):
                on_gradient(p, self._arrived, part, i)

    def begin(self) -> None:
        """Forget gradients that were collected, or summed already."""
        self._receive()
        for f in self.flats:
            f.grad, f.whole_grad, f.missing = None, None, set()

    def _arrived(self, part: int, i: int, p: torch.Tensor) -> None:
        """Move a finished gradient into its part's flat one; send that when it is complete."""
        f = self.flats[part]
        complete = f.collect(i, p.grad)
        p.grad = None
        if complete:
            self._send(f)

    def _send(self, f: Flat) -> None:
        self._receive()  # a part being summed still holds its whole gradients: one at a time
        self.under_way = f, f.start_reduce(f.collected())

    def _receive(self) -> None:
        """Wait for the current reduce-scatter, and add its result to the shard's gradient."""
        if self.under_way:
            f, handle = self.under_way
            f.add(handle.wait())
            self.under_way = None

    def gradient_memory(self) -> list[torch.Tensor]:
        """As stage 1, and the parts that are being filled or have been summed; waits for the current one."""
        self._receive()
        sums = [t for f in self.flats for t in (f.grad, f.whole_grad) if t is not None]
        return super().gradient_memory() + sums

    def finish(self) -> None:
        """Wait for all sums. A part that got no gradient, or only some, is summed now."""
        self._receive()
        for f in reversed(self.flats):
            if f.whole_grad is not None or f.grad is None:
                self._send(f)
        self._receive()
        self._hand_out()


class Zero3(Zero2):
    """As stage 2, and weights too are sharded: whole only while their block computes.

    Forward: before a block an all-gather of its weights (the next block's is started at once: prefetch); after it they
    are freed. Only blocks' inputs are kept. Backward: all-gather again, run the block again, then reduce-scatter its
    gradients and free. (`Refilled` parts keep all activations, and no block runs twice.) The tied embedding stays from
    its first use until its second, the head's backward, is over.
    Bytes per rank and micro-batch: 2 (n-1)/n of the blocks' weights, (n-1)/n of the others', and (n-1)/n of the
    gradients' (section 7.2.2 gathers all of it twice).
    """

    def __init__(self, model, axis: Axis, flat=Flat, prefetch: bool = True, experts: Axis | None = None):
        super().__init__(model, axis, flat, experts)
        for f in self.flats:
            f.keep_only_shard()
        self.prefetch = prefetch
        self.blocks = []  # the parts of every block, in order
        self.kept = 0  # how often the tied embedding has been used and waits for the head
        self.refill = flat is Refilled
        if not self.refill:  # a graph over a block would hold its weights until backward, freed or not
            apply_recompute(model)
        for i, block in enumerate(model.h.values()):
            self.blocks.append(self._parts_of(block))
            block.register_forward_pre_hook(lambda block, _, i=i: self._before_block(i))
            block.register_forward_hook(lambda block, _, y, i=i: self._after_block(i, y))
        self._wrap_ends(model)

    def _parts_of(self, *modules) -> list[Flat]:
        inside = {id(p) for m in modules if m is not None for p in m.parameters()}
        return [f for f in self.flats if id(f.parameters[0]) in inside]

    def _before_block(self, i: int) -> None:
        for f in self.blocks[i]:
            f.gather()
        # With a graph it is backward that runs the block, again and from the last to the first, or fills it again.
        self._prefetch(i - 1 if torch.is_grad_enabled() and not self.refill else i + 1)

    def _prefetch(self, i: int) -> None:
        """Start to gather block i, or after the last block the head, while something else computes."""
        for f in [*self.blocks, self.last][i] if self.prefetch and i >= 0 else []:
            f.start_gather()

    def _after_block(self, i: int, y: torch.Tensor) -> None:
        if self.refill or not torch.is_grad_enabled():
            for f in self.blocks[i]:
                f.release()
        if self.refill and y.requires_grad:
            y.register_hook(lambda _: self._before_backward(i))

    def _before_backward(self, i: int) -> None:
        """Fill again what the graph over block i has saved."""
        for f in self.blocks[i]:
            f.gather()
        self._prefetch(i - 1)

    def _send(self, f: Flat) -> None:
        super()._send(f)
        if any(f in parts for parts in self.blocks) and f.users:
            f.release()

    def _wrap_ends(self, model) -> None:
        """Gather the weights of embedding and head around their use."""
        embed, head, loss, chunked = model.embed, model.head, model.loss, isinstance(model.loss, ChunkedLoss)
        first = self._parts_of(model.wte, model.wpe) if model.wpe is not None else []
        self.last = self._parts_of(model.wte, model.ln_f) if model.ln_f is not None else []
        tied = [f for f in first if f in self.last]

        def gathered_embed(*args):
            for f in first:
                f.gather()
            self._prefetch(0)
            x = embed(*args)  # its backward needs the tokens, not the weights
            for f in first:
                if f not in tied:
                    f.release()
            self.kept += 1
            return x

        def gathered_head(x, *args):
            for f in self.last:
                f.gather()
            if self.kept:  # by the embedding until now; from here on the head holds it
                self.kept -= 1
                for f in tied:
                    f.release()
            logits = head(x, *args)
            if logits.requires_grad:
                x.register_hook(release_head)  # the gradient of x is known when the head's backward is over
            elif not chunked:
                release_head()
            return logits

        def gathered_loss(x, targets):
            total = loss(
                x, targets
            )  # a chunked loss multiplies by the head's weights, and comes after every head
            if not x.requires_grad:
                release_head()
            return total

        gathered_loss.__wrapped__ = loss

        def release_head(_=None):
            for f in self.last:
                f.release()

        model.embed, model.head = gathered_embed, gathered_head
        if chunked:
            model.loss = gathered_loss

    def updated(self) -> None:
        """Nothing whole outlives an update (a schedule may have kept a block's weights); gather it when needed."""
        self.kept = 0
        for f in self.flats:
            f.forget()
