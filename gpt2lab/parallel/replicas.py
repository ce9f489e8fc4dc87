"""What every way of summing gradients over the data axis offers to the trainer, and its simplest form."""

from dataclasses import replace

import torch

from ..ranks.mesh import Axis
from . import spec
from .finish import Piece


class Replicas:
    """Replicated weights on one rank alone: there is nobody to sum with. The others build on it."""

    def __init__(self, model, axis: Axis):
        self.axis = axis
        self.pieces = [Piece(n, p, spec.of(p), p.dim() >= 2) for n, p in model.named_parameters()]

    def last_micro(self) -> None:
        """The next backward is the step's last: a strategy that overlaps starts sending in it."""

    def finish(self) -> None:
        """Complete the sum over the axis: after this every piece's `.grad` is the global gradient."""
        for p in self.pieces:
            gradient(p.tensor)

    def updated(self) -> None:
        """Called when the optimizer has stepped the pieces; here they are the model's own parameters."""

    def weight_memory(self) -> list[torch.Tensor]:
        """The tensors that hold what the optimizer steps on this rank (the model's own parameters apart)."""
        return [p.tensor for p in self.pieces]

    def gradient_memory(self) -> list[torch.Tensor]:
        """The tensors that hold gradients on this rank at this moment, for those who count bytes."""
        return [p.tensor.grad for p in self.pieces if p.tensor.grad is not None]

    def gather(self, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values that belong to the pieces (weights, gradients, moments), whole over the data axis, by name."""
        return {p.name: v for p, v in zip(self.pieces, values, strict=True)}

    def scatter(self, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """What `gather` undoes: each piece's own part of the named tensors."""
        return [tensors[p.name] for p in self.pieces]


def gradient(p: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter; zero, and kept as such, where no row of this rank used it."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad


def owned(piece: Piece, axis: Axis) -> Piece:
    """A piece that exists on one rank of the data axis only, marked so that the norm counts it there."""
    length = piece.tensor.size(0)
    cuts = tuple(spec.Cut(name, 0, length) for name in axis.name.split("+"))
    return replace(piece, spec=replace(piece.spec, cuts=piece.spec.cuts + cuts))


def nothing(like: Piece) -> Piece:
    """An empty piece, for a rank that owns none: optimizers want at least one tensor."""
    return replace(like, tensor=like.tensor.detach().new_empty(0), spec=spec.Spec())
