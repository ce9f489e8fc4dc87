"""Muon: the update of a matrix is its momentum with all singular values brought near 1, so it needs whole matrices.

An orthogonalised part of a matrix is no part of the orthogonalised matrix. Exact are two ways: the matrix has an owner
(replicas, pipeline stages, ZeRO's `data=owner`; nanochat's DistMuon), and nothing is sent; or it is cut along one dim
(tensor parallelism), and in each iteration the products X X^T, to which each rank adds its columns' part, are summed.
Bytes per rank, tensor-parallel: six all-reduces a step, one of a number a matrix, five of C^2 numbers a matrix.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon; the
rate of Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2, arXiv:2502.16982. PyTorch's torchtitan takes
cut matrices to owners and back by all-to-all (DistributedMuon, 2026, github.com/pytorch/torchtitan/pull/4060).
"""

import math

import torch

from ..ranks.axis import Axis
from .finish import Piece, summed

A, B, C = 3.4445, -4.7750, 2.0315  # of the quintic: steep at zero, and not quite 1 at 1
ITERATIONS, MOMENTUM, EPS = 5, 0.95, 1e-7


def by_muon(piece: Piece) -> bool:
    """Whether Muon steps a piece: a matrix of the blocks, c_attn as one. Embeddings, biases and norms are AdamW's."""
    return piece.decay and piece.name.startswith("h.")


def orthogonalised(matrices: list[torch.Tensor], cuts: list[int | None], axis: Axis) -> list[torch.Tensor]:
    """Each matrix with singular values of about 0.7 to 1.2; `cuts`: the dim of each that is cut over the axis, or None.

    A rank gives its slices and gets their part. A cut matrix is turned so that its columns are cut.
    """
    turned = [
        x.size(0) > x.size(1) if cut is None else cut == 0 for x, cut in zip(matrices, cuts, strict=True)
    ]
    xs = [x.mT if turn else x for x, turn in zip(matrices, turned, strict=True)]
    squares = _summed([x.square().sum() for x in xs], cuts, axis)
    xs = [x / square.sqrt().clamp_min(EPS) for x, square in zip(xs, squares, strict=True)]
    for _ in range(ITERATIONS):
        grams = _summed([x @ x.mT for x in xs], cuts, axis)
        xs = [A * x + (B * gram + C * gram @ gram) @ x for x, gram in zip(xs, grams, strict=True)]
    return [x.mT if turn else x for x, turn in zip(xs, turned, strict=True)]


def _summed(parts: list[torch.Tensor], cuts: list[int | None], axis: Axis) -> list[torch.Tensor]:
    """The parts, and those of cut matrices as sums over the axis, in one message."""
    mine = [part for part, cut in zip(parts, cuts, strict=True) if cut is not None]
    if not mine:
        return parts
    sums = iter(summed(mine, axis))
    return [part if cut is None else next(sums) for part, cut in zip(parts, cuts, strict=True)]


class Muon(torch.optim.AdamW):
    """AdamW that leaves the pieces of `by_muon` to Muon; `axis` is that of tensor parallelism."""

    def __init__(self, groups: list[dict], pieces: list[Piece], axis: Axis, **options):
        super().__init__(groups, **options)
        self.pieces, self.axis = [piece for piece in pieces if by_muon(piece)], axis
        for piece in self.pieces:
            if piece.within is not None and piece.tensor.numel() != piece.within.numel():
                raise ValueError(f"{piece.name} {tuple(piece.within)} is cut flat. {OFF} Use data=owner.")
        self.cuts = [next((c.dim for c in p.spec.cuts if c.axis == axis.name), None) for p in self.pieces]

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """One update of everything."""
        own = {piece.tensor: piece.tensor.grad for piece in self.pieces}
        nesterov = []
        for piece in self.pieces:
            grad = piece.tensor.grad
            momentum = self.state[piece.tensor].setdefault("momentum_buffer", torch.zeros_like(grad))
            momentum.lerp_(grad, 1 - MOMENTUM)
            nesterov.append(grad.lerp(momentum, MOMENTUM).view(piece.within or grad.shape))
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for piece, x in zip(self.pieces, orthogonalised(nesterov, self.cuts, self.axis), strict=True):
            p, group = piece.tensor, groups[piece.tensor]
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(x.reshape(p.shape), alpha=-group["lr"] * 0.2 * math.sqrt(max(self._whole(piece))))
            p.grad = None  # so that AdamW leaves it
        super().step(closure)
        for p, grad in own.items():
            p.grad = grad

    def _whole(self, piece: Piece) -> list[int]:
        """The shape of the whole matrix."""
        shape = list(piece.within or piece.tensor.shape)
        for cut in (cut for cut in piece.spec.cuts if cut.axis == self.axis.name):
            shape[cut.dim] = cut.length
        return shape


OFF = "Muon needs whole matrices: with 64 x 64 numbers, each half orthogonalised by itself, the update is off by 0.53."


def check(plan) -> None:
    """Raise ValueError for plans whose update would be another than the serial one."""
    if plan.zero and plan.data != "owner":
        use = "zero=0" if plan.ep > 1 else "zero=3,data=owner, where each block has an owner, or zero=0"
        raise ValueError(
            f"zero={plan.zero} cuts weights flat, wherever a rank's share ends. {OFF} Use {use}."
        )
    if plan.asynchronous:
        raise ValueError(
            f"optimizer=muon does not go with schedule={plan.schedule}: the emulator of stale weights knows sgd and "
            "adamw. Use one of them, or a schedule with a flush."
        )
