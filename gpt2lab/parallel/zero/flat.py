"""Flat shards: the parameters of one part of the model in one flat buffer, cut evenly over the ranks of an axis.

With n ranks, P elements are padded to n s, s = ceil(P / n); rank r owns elements r s to (r+1) s, wherever the borders
of parameters lie.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ...ranks import comm
from ...ranks.mesh import Axis
from .. import spec
from ..finish import Piece


def into_groups(model) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """The parts of a model: one per block, one per module outside the blocks, in the order of use.

    Parameters that other axes cut are separate from those that they replicate: so replicas have equal shards, and sums
    over those axes add like to like. Experts, which have fewer replicas, are separate too.
    """
    groups = {}
    for name, p in model.named_parameters():
        groups.setdefault((part_of(name), frozenset(spec.of(p).axes)), []).append((name, p))
    return list(groups.values())


def part_of(name: str) -> str:
    """The part of a parameter: its block, such as h.3, or its module outside the blocks."""
    return ".".join(name.split(".")[: 2 if name.startswith("h.") else 1])


def owner_of(part: int, parts: int, ranks: int) -> int:
    """The rank that owns a part as a whole, in the lecture's variant: neighbours share an owner."""
    return part * ranks // parts


class Flat:
    """One part of the model as a flat, padded buffer of which this rank owns a shard.

    `shard` is what the optimizer steps: float32 where the weights are narrower ("master weights").
    """

    def __init__(self, named: list[tuple[str, torch.nn.Parameter]], axis: Axis, place: int = 0):
        self.names, self.parameters = zip(*named, strict=True)
        self.axis, self.shapes = axis, [p.shape for p in self.parameters]
        self.dtype = self.parameters[0].dtype
        self.sizes = [p.numel() for p in self.parameters]
        self.starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.lengths = self.shard_lengths(sum(self.sizes), place)
        self.first = sum(self.lengths[: axis.rank])
        self.length = self.lengths[axis.rank]
        self.full = None  # the whole buffer (sum of lengths,), while this rank has it
        self.users = 0
        self.coming = None  # an all-gather in progress
        self.grad = None  # of the shard
        self.whole_grad, self.missing = None, set()  # gradients that are collected, and which have not come

    def shard_lengths(self, elements: int, place: int) -> list[int]:
        """How many elements each rank owns: equally many, the last ones padded."""
        return [-(-elements // self.axis.size)] * self.axis.size

    def lay_out(self) -> None:
        """Move the parameters into one flat buffer; from now on they are views of it."""
        self.full = self.join([p.detach() for p in self.parameters])
        self._show()
        own = self.full[self.first : self.first + self.length]
        wide = torch.promote_types(self.dtype, torch.float32)
        self.shard = own if wide == self.dtype else own.to(wide)

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Tensors of the parameters' shapes as one flat buffer, padding zero; a single one that fits is not copied."""
        padding = sum(self.lengths) - sum(self.sizes)
        if len(tensors) == 1 and not padding:
            return tensors[0].flatten()
        return torch.cat([*(t.flatten() for t in tensors), tensors[0].new_zeros(padding)])

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a flat buffer that belong to the parameters, as views in their shapes."""
        parts = zip(self.starts, self.sizes, self.shapes, strict=True)
        return [flat[start : start + size].view(shape) for start, size, shape in parts]

    def _show(self) -> None:
        for p, view in zip(self.parameters, self.split(self.full), strict=True):
            p.data = view

    def shares(self) -> list[tuple[int, slice, slice]]:
        """(parameter, its elements, their range in the shard) for each parameter of which this rank owns some."""
        found = []
        for i, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            first, last = max(start, self.first), min(start + size, self.first + self.length)
            if first < last:
                here = slice(first - self.first, last - self.first)
                found.append((i, slice(first - start, last - start), here))
        return found

    def pieces(self) -> list[Piece]:
        """The shard as pieces for the optimizer, one per parameter, so that weight decay still knows matrices."""
        return [
            Piece(
                self.names[i],
                self.shard[here],
                self._marked(self.parameters[i]),
                decay=len(self.shapes[i]) >= 2,
                within=self.shapes[i],
                start=part.start,
            )
            for i, part, here in self.shares()
        ]

    def _marked(self, p: torch.Tensor) -> spec.Spec:
        """The parameter's Spec with the data axes among its cuts, so that the norm counts every rank's piece."""
        cuts = tuple(spec.Cut(name, 0, p.numel()) for name in self.axis.name.split("+"))
        return replace(spec.of(p), cuts=spec.of(p).cuts + cuts)

    # whole weights: there, and gone again

    def start_gather(self) -> None:
        """Start gathering the whole buffer, unless it is here or being gathered."""
        if self.full is None and self.coming is None:
            self.coming = comm.gather_flat(self.shard.to(self.dtype), self.axis, async_op=True)

    def gather(self) -> None:
        """Have the whole weights: each `gather` is undone by one `release`."""
        self.users += 1
        if self.full is None:
            self.start_gather()
            self.full, self.coming = self.coming.wait(), None
            self._show()

    def release(self) -> None:
        """Free the whole weights when they are no longer used; only the shard stays."""
        self.users -= 1
        if self.users == 0:
            self.drop()

    def drop(self) -> None:
        """Free the whole buffer. The parameters keep their shapes over a single element."""
        self.full = None
        stand_in = self.shard.new_zeros(1, dtype=self.dtype)
        for p, shape in zip(self.parameters, self.shapes, strict=True):
            p.data = stand_in.expand(shape)

    def forget(self) -> None:
        """Free the whole buffer even if it is used or being gathered: its weights are old now."""
        if self.coming is not None:
            self.coming.wait()
        self.users, self.coming = 0, None
        self.drop()

    def keep_only_shard(self) -> None:
        """Forget the whole weights for good: the shard gets memory of its own."""
        self.shard = self.shard.clone()
        self.drop()

    def spread(self) -> None:
        """After an update: gather all ranks' new shards into the whole buffer."""
        own = self.shard.to(self.dtype)
        comm.gather_flat(own.clone() if own is self.shard else own, self.axis, out=self.full)

    # gradients: summed, and only the own shard kept

    def collect(self, i: int, grad: torch.Tensor) -> bool:
        """Move the gradient of parameter i into the flat one of its part; says whether that is complete."""
        if len(self.sizes) == 1:
            self.whole_grad = self.join([grad])
            return True
        if self.whole_grad is None:
            self.whole_grad, self.missing = grad.new_empty(sum(self.lengths)), set(range(len(self.sizes)))
            self.whole_grad[sum(self.sizes) :] = 0  # the padding
        here = self.whole_grad[self.starts[i] : self.starts[i] + self.sizes[i]]
        (here.copy_ if i in self.missing else here.add_)(grad.flatten())
        self.missing.discard(i)
        return not self.missing

    def collected(self) -> torch.Tensor:
        """Give away the flat gradient, zero where none has come."""
        if self.whole_grad is None:
            return self.shard.new_zeros(sum(self.lengths), dtype=self.dtype)
        for i in self.missing:
            self.whole_grad[self.starts[i] : self.starts[i] + self.sizes[i]] = 0
        whole, self.whole_grad, self.missing = self.whole_grad, None, set()
        return whole

    def start_reduce(self, flat: torch.Tensor):
        """Begin the sum over the axis of whole flat gradients; the Handle gives this rank's shard of it.

        The part's name is sent as well: if ranks sum different parts, the call raises an error.
        """
        return comm.reduce_scatter_flat(flat, self.axis, async_op=True, what=self.names[0])

    def add(self, shard: torch.Tensor) -> None:
        """Add a summed shard to the gradient of this step."""
        shard = shard.to(self.shard.dtype)
        self.grad = shard if self.grad is None else self.grad.add_(shard)

    def assemble(self, values: Iterator[torch.Tensor]) -> list[torch.Tensor]:
        """Whole tensors from values that belong to the pieces of all ranks; takes the next ones of `values`."""
        shard = self.shard.new_zeros(self.length)
        for _, _, here in self.shares():
            shard[here] = next(values).detach()
        return self.split(self.join_shards(shard))

    def join_shards(self, shard: torch.Tensor) -> torch.Tensor:
        """All ranks' shards as one flat buffer."""
        return comm.gather_flat(shard, self.axis)


class Refilled(Flat):
    """One part whose whole buffer is only emptied: what a graph saved of it is there again when it is gathered.

    So backward needs no second forward (Zhao et al. 2023, section 4). Parameters are set by `.data`, of which autograd
    keeps no count of changes.
    """

    def keep_only_shard(self) -> None:
        """Keep the buffer as an object, without memory."""
        self.room = self.full
        super().keep_only_shard()

    def start_gather(self) -> None:
        """Give the buffer its memory back, and gather into it."""
        if self.full is None and self.coming is None:
            self.room.untyped_storage().resize_(self.room.nbytes)
            self.coming = comm.gather_flat(self.shard.to(self.dtype), self.axis, async_op=True, out=self.room)

    def drop(self) -> None:
        """Free the memory behind the parameters and behind all that a graph saved of them."""
        self.full = None
        self.room.untyped_storage().resize_(0)


class Owned(Flat):
    """One part of the model that belongs to one rank as a whole: broadcast before use, gradients reduced to it.

    This is how CS336's lecture program shards ("whole layers owned by ranks"): one root sends while the others wait.
    """

    def shard_lengths(self, elements: int, place: int) -> list[int]:
        """All of it at the owner, nothing elsewhere."""
        self.owner = place
        return [elements if rank == place else 0 for rank in range(self.axis.size)]

    def start_gather(self) -> None:
        """The owner's weights, broadcast (and waited for)."""
        if self.full is None and self.coming is None:
            self.coming = comm.finished(self.join_shards(self.shard.to(self.dtype)), async_op=True)

    def start_reduce(self, flat: torch.Tensor):
        """The sum arrives at the owner alone."""
        total = comm.reduce(flat, self.axis, self.owner)
        mine = total if self.length else total.new_empty(0)  # not a view, which would keep all of it alive
        return comm.finished(mine, async_op=True)

    def join_shards(self, shard: torch.Tensor) -> torch.Tensor:
        """The owner's buffer on every rank."""
        mine = shard if self.length else shard.new_empty(sum(self.lengths))
        return comm.broadcast(mine, self.axis, self.owner)
