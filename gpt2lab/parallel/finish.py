"""What the optimizer steps on one rank, and how a step is finished: partial sums, ties, norm, clip, in this order."""

import math
from dataclasses import dataclass, replace

import torch

from ..ranks import comm
from ..ranks.mesh import Axis, Mesh
from .spec import Spec


@dataclass(frozen=True)
class Piece:
    """A tensor that this rank's optimizer steps: a whole parameter, a slice of one, or a part of a flat shard.

    `spec` says how it was cut, data axes included (ZeRO); `decay` whether weight decay applies (matrices only). A flat
    part of a shard holds the elements from `start` on of a parameter, or of its slice, of shape `within`.
    """

    name: str
    tensor: torch.Tensor
    spec: Spec
    decay: bool
    within: torch.Size | None = None
    start: int = 0
    copies: Axis | None = None  # ranks that hold the same stretch, where the data axes cut it in groups


def empty(like: Piece) -> Piece:
    """A piece without elements, for a rank that owns none: optimizers want at least one tensor."""
    return replace(like, tensor=like.tensor.detach().new_empty(0), spec=Spec())


def summed(tensors: list[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    """The sums of tensors over the axis, all in one message."""
    flat = comm.all_reduce(torch.cat([t.flatten() for t in tensors]), axis)
    parts = flat.split([t.numel() for t in tensors])
    return [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]


def sum_partial(pieces: list[Piece], mesh: Mesh) -> None:
    """Complete the gradients that are only partial sums over an axis, as those of norms under sequence parallelism."""
    for name in sorted({axis for p in pieces for axis in p.spec.partial}):
        grads = [p.tensor.grad for p in pieces if name in p.spec.partial and p.tensor.numel()]
        if grads:
            for g, total in zip(grads, summed(grads, mesh[name]), strict=True):
                g.copy_(total)


CHUNK = 4096  # elements: few enough for 32 bits to add up their squares to six digits


def gradient_norm(pieces: list[Piece], mesh: Mesh, ranks: Axis | None = None) -> float:
    """The norm of the gradient that `ranks` hold together, such as those of one pipeline stage; None: all.

    Every element counts exactly once, as in the serial run: ranks that hold the same gradient share the sum, each adds
    a part of it. A tied copy does not count, nor does an excess load.
    """
    mine = [_counted_here(p, mesh) for p in pieces if not p.spec.tied_copy and not p.spec.load]
    norms = [torch.zeros(1, dtype=torch.float64, device=pieces[0].tensor.device)]
    norms += [norm for x in mine for norm in _norms(x)]
    # all at once: on a GPU it is the number of calls that takes time
    square = torch.cat(norms).square().sum()
    return math.sqrt(comm.all_reduce(square.cpu(), ranks or mesh.world).item())


def _norms(x: torch.Tensor) -> list[torch.Tensor]:
    """Norms of chunks of x (P,), each summed in x's own precision or 32 bits; without a copy of x."""
    end, wide = len(x) // CHUNK * CHUNK, torch.promote_types(x.dtype, torch.float32)
    parts = [part for part in (x[:end].view(-1, CHUNK), x[end:].view(1, -1)) if part.numel()]
    return [torch.linalg.vector_norm(part, dim=1, dtype=wide) for part in parts]


def _counted_here(p: Piece, mesh: Mesh) -> torch.Tensor:
    """This rank's part of a gradient, of which every rank of the axes that do not cut it holds a copy."""
    place, copies = 0, 1
    axes = [mesh[name] for name in (*p.spec.replicas, "tp") if name not in p.spec.axes]
    for axis in axes + [p.copies] * bool(p.copies):
        place, copies = place * axis.size + axis.rank, copies * axis.size
    return p.tensor.grad.flatten().tensor_split(copies)[place]


def clip(pieces: list[Piece], norm: float, limit: float | None) -> None:
    """Scale all gradients so that their global norm is at most `limit`, with torch's own formula."""
    if limit is not None and norm + 1e-6 > limit:
        for grad in (p.tensor.grad for p in pieces if p.tensor.grad is not None):
            grad.mul_(limit / (norm + 1e-6))


@torch.no_grad()
def balance(pieces: list[Piece], config) -> None:
    """Move each expert's load bias by `config.experts.speed`: down where it had more than an even share, else up."""
    for p in pieces:
        if p.spec.load:
            p.tensor.sub_(p.tensor.grad.sign(), alpha=config.experts.speed)
