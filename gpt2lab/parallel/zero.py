"""ZeRO: replicas that share out what each of them would otherwise hold n times.

Stage 1 shards the optimizer state, stage 2 the gradients too, stage 3 the weights too. Per rank, with P elements of e
bytes, n ranks and AdamW (S = P e, each divided by n up to padding):

stage   weights   gradients   optimizer   sent a step
1       S         S           2 S / n     2 S (n-1)/n
2       S         S / n       2 S / n     2 S (n-1)/n    (with k micro-batches (k+1) S (n-1)/n)
3       S / n     S / n       2 S / n     3 S (n-1)/n    (with k micro-batches 3 k S (n-1)/n)

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", sections 5 and 7.
"""

import torch

from .. import spec
from ..ranks.mesh import Axis
from .flat import Flat, Owned
from .pieces import Piece
from .replicas import Replicas, gradient, nothing


class Zero1(Replicas):
    """Every rank keeps all weights and gradients, but steps only its shard of the weights.

    Forward: nothing. Backward: nothing; after it a reduce-scatter gives each rank its shard of the summed gradient.
    After the update an all-gather brings everybody's new weights.
    Bytes per rank: (n-1)/n of the gradients' plus (n-1)/n of the weights' (section 7.1: together an all-reduce).
    """

    def __init__(self, model, axis: Axis, flat=Flat):
        self.axis = axis
        groups = into_groups(model)
        self.flats = [flat(g, axis, i * axis.size // len(groups)) for i, g in enumerate(groups)]
        self.whole = [Piece(n, p, spec.of(p), p.dim() >= 2) for n, p in model.named_parameters()]
        for f in self.flats:
            f.lay_out()

    @property
    def pieces(self) -> list[Piece]:
        """What this rank's optimizer steps: stretches of its shards."""
        if not hasattr(self, "_pieces"):
            self._pieces = [p for f in self.flats for p in f.pieces()] or [nothing(self.whole[0])]
        return self._pieces

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
        grads = [f.grad[here] for f in self.flats for _, _, here in f.shares()]
        for p, grad in zip(self.pieces, grads or [torch.zeros_like(self.pieces[0].tensor)], strict=True):
            p.tensor.grad = grad
        for f in self.flats:
            f.grad = None

    def weight_memory(self) -> list[torch.Tensor]:
        """The shards, padding included."""
        return [f.shard for f in self.flats]

    def gradient_memory(self) -> list[torch.Tensor]:
        """Whole gradients in their parameters, and shards in the pieces."""
        return [p.tensor.grad for p in (*self.whole, *self.pieces) if p.tensor.grad is not None]

    def updated(self) -> None:
        """Bring everybody's new shards into the whole weights."""
        for f in self.flats:
            f.spread()

    def gather(self, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values that belong to the pieces, whole again, by name."""
        values, found = list(values), {}
        for f in self.flats:
            count = len(f.shares())
            mine, values = values[:count], values[count:]
            found.update(zip(f.names, f.assemble(mine), strict=True))
        return found

    def scatter(self, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """What `gather` undoes: of each tensor the stretch that this rank owns."""
        mine = [tensors[f.names[i]].flatten()[part] for f in self.flats for i, part, _ in f.shares()]
        return mine or [self.pieces[0].tensor]


class Zero2(Zero1):
    """As stage 1, but a part's gradients are reduced as soon as backward has produced them, and then freed.

    Forward: nothing. Backward: when all gradients of a block are there, one asynchronous reduce-scatter; only the own
    shard stays. So gradients are summed in every micro-batch: keeping them whole until the last would give up the gain.
    Bytes per rank: k (n-1)/n of the gradients' with k micro-batches, plus (n-1)/n of the weights' (section 7.2.1).
    """

    def __init__(self, model, axis: Axis, flat=Flat):
        super().__init__(model, axis, flat)
        self.under_way = None  # (part, handle) of a reduce-scatter
        for f in self.flats:
            f.arrived, f.whole_grad = 0, None
            for i, p in enumerate(f.parameters):
                p.register_post_accumulate_grad_hook(lambda p, f=f, i=i: self._arrived(f, i, p))

    def _arrived(self, f: Flat, i: int, p: torch.Tensor) -> None:
        """Move a finished gradient into its part's flat one; send that when it is complete."""
        if f.whole_grad is None:
            f.whole_grad = p.grad.new_zeros(sum(f.lengths))
        f.whole_grad[f.starts[i] : f.starts[i] + f.sizes[i]] += p.grad.flatten()
        p.grad = None
        f.arrived += 1
        if f.arrived == len(f.parameters):
            self._send(f)

    def _send(self, f: Flat) -> None:
        self._receive()  # a part under way still holds its whole gradients: one at a time
        self.under_way = f, f.start_reduce(f.whole_grad)
        f.arrived, f.whole_grad = 0, None

    def _receive(self) -> None:
        """Wait for the reduce-scatter under way, and add what it brings to the shard's gradient."""
        if self.under_way:
            f, handle = self.under_way
            f.add(handle.wait())
            self.under_way = None

    def gradient_memory(self) -> list[torch.Tensor]:
        """As stage 1, and the parts that are being filled or have been summed; waits for the one under way."""
        self._receive()
        sums = [t for f in self.flats for t in (f.grad, f.whole_grad) if t is not None]
        return super().gradient_memory() + sums

    def finish(self) -> None:
        """Wait for all sums. A part that got no gradient, or only some, is summed now."""
        self._receive()
        for f in reversed(self.flats):
            if f.arrived or f.grad is None:
                f.whole_grad = f.whole_grad if f.arrived else f.shard.new_zeros(sum(f.lengths), dtype=f.dtype)
                self._send(f)
        self._receive()
        self._hand_out()


class Zero3(Zero2):
    """As stage 2, and weights too are sharded: whole only while their block computes.

    Forward: before a block an all-gather of its weights (the next block's is started at once: prefetch); after it they
    are freed. Only blocks' inputs are kept. Backward: all-gather again, run the block again, then reduce-scatter its
    gradients and free. The embedding serves twice: at the start, and as the head until the head's backward is done.
    Bytes per rank and micro-batch: 2 (n-1)/n of the weights' plus (n-1)/n of the gradients' (section 7.2.2).
    """

    def __init__(self, model, axis: Axis, flat=Flat, prefetch: bool = True):
        super().__init__(model, axis, flat)
        for f in self.flats:
            f.keep_only_shard()
        self.prefetch = prefetch
        self.blocks = []  # the parts of every block, in order
        model.recompute = True  # a graph over a block would hold its weights until backward, freed or not
        for i, block in enumerate(model.h.values()):
            self.blocks.append(self._parts_of(block))
            block.register_forward_pre_hook(lambda block, _, i=i: self._before_block(i))
            block.register_forward_hook(lambda block, _, y, i=i: self._after_block(i))
        self._wrap_ends(model)

    def _parts_of(self, *modules) -> list[Flat]:
        inside = {id(p) for m in modules if m is not None for p in m.parameters()}
        return [f for f in self.flats if id(f.parameters[0]) in inside]

    def _before_block(self, i: int) -> None:
        for f in self.blocks[i]:
            f.gather()
        following = (
            i - 1 if torch.is_grad_enabled() else i + 1
        )  # with a graph it is backward that runs the block
        if self.prefetch and 0 <= following < len(self.blocks):
            for f in self.blocks[following]:
                f.start_gather()

    def _after_block(self, i: int) -> None:
        if not torch.is_grad_enabled():
            for f in self.blocks[i]:
                f.release()

    def _send(self, f: Flat) -> None:
        super()._send(f)
        if any(f in parts for parts in self.blocks) and f.users:
            f.release()

    def _wrap_ends(self, model) -> None:
        """Gather the weights of embedding and head around their use."""
        embed, head = model.embed, model.head
        first, last = self._parts_of(model.wte, model.wpe), self._parts_of(model.wte, model.ln_f)

        def gathered_embed(*args):
            for f in first:
                f.gather()
            x = embed(*args)  # its backward needs the tokens, not the weights
            for f in first:
                f.release()
            return x

        def gathered_head(x, *args):
            for f in last:
                f.gather()
            logits = head(x, *args)
            release = lambda _=None: [f.release() for f in last] and None
            if logits.requires_grad:
                x.register_hook(
                    release
                )  # called when the gradient of x is known: the head's backward is over
            else:
                release()
            return logits

        model.embed, model.head = gathered_embed, gathered_head

    def updated(self) -> None:
        """Nothing whole outlives an update (a schedule may have kept a block's weights); gather it when needed."""
        for f in self.flats:
            f.forget()


def into_groups(model) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """The parts of a model: one per block, one per module outside the blocks, in the order of use.

    Parameters that other axes cut lie apart from those that they replicate: so replicas have equal shards, and
    sums over those axes add like to like.
    """
    groups = {}
    for name, p in model.named_parameters():
        part = ".".join(name.split(".")[:2]) if name.startswith("h.") else name.split(".")[0]
        groups.setdefault((part, bool(spec.of(p).axes)), []).append((name, p))
    return list(groups.values())


STAGES = {1: Zero1, 2: Zero2, 3: Zero3}


def apply_zero(model, axis: Axis, plan) -> Zero1:
    """The ZeRO stage that the plan names, for a model that all other strategies have edited."""
    if plan.data == "owner":
        return Zero3(model, axis, flat=Owned, prefetch=False)
    return STAGES[plan.zero](model, axis)


def check(config, plan, rows: int, length: int) -> None:
    """Any number of ranks can share any number of elements; the stage must exist."""
    if plan.zero not in STAGES:
        raise ValueError(
            f"zero={plan.zero} is no stage of ZeRO. Use zero=1, 2 or 3, or 0 for whole replicas."
        )
    if plan.data not in ("bucket", "owner") or (plan.data == "owner" and plan.zero != 3):
        raise ValueError(
            f"data={plan.data} does not go with zero={plan.zero}. Leave data out, or use data=owner with zero=3."
        )
