"""Replicated weights, which every way of summing gradients but ZeRO builds on."""

from dataclasses import replace

import torch

from ..ranks.mesh import Axis
from . import spec
from .base import GradientSync
from .finish import Piece


class Replicas(GradientSync):
    """Replicated weights on one rank alone: there is nothing to sum. Other forms build on it."""

    def __init__(self, model, axis: Axis):
        self.axis = axis
        self.pieces = [Piece(n, p, spec.of(p), p.dim() >= 2) for n, p in model.named_parameters()]

    def finish(self) -> None:
        """Every piece gets a gradient, also where no row used it."""
        for p in self.pieces:
            gradient(p.tensor)

    def weight_memory(self) -> list[torch.Tensor]:
        """The model's own parameters."""
        return [p.tensor for p in self.pieces]

    def gradient_memory(self) -> list[torch.Tensor]:
        """The gradients that are there."""
        return [p.tensor.grad for p in self.pieces if p.tensor.grad is not None]

    def whole(self, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values themselves, by name."""
        return {p.name: v for p, v in zip(self.pieces, values, strict=True)}

    def part(self, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """The named tensors themselves."""
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
