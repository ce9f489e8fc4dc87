"""Data parallelism: every rank holds the whole model and some rows of the batch; gradients are summed.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
"""

import torch

from .. import spec
from ..ranks import comm
from ..ranks.mesh import Axis
from .pieces import Piece


class DataParallel:
    """Replicated weights; after backward one blocking all-reduce per tensor. On one rank: nothing at all.

    Forward: nothing. Backward: a SUM of every gradient (the loss was divided by the global token count already).
    Bytes per rank: 2 (n-1)/n of the gradients' bytes a step.
    """

    def __init__(self, model, axis: Axis):
        self.axis = axis
        self.pieces = [Piece(n, p, spec.of(p), p.dim() >= 2) for n, p in model.named_parameters()]

    def last_micro(self) -> None:
        """The next backward is the step's last: a strategy that overlaps starts sending in it."""

    def finish(self) -> None:
        """Complete the sum over the axis: after this every piece's `.grad` is the global gradient."""
        for p in self.pieces:
            if p.tensor.grad is None:
                p.tensor.grad = torch.zeros_like(p.tensor)
            p.tensor.grad = comm.all_reduce(p.tensor.grad, self.axis)

    def updated(self) -> None:
        """Called when the optimizer has stepped the pieces; here they are the model's own parameters."""

    def gather(self, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values that belong to the pieces (weights, gradients, moments), whole over the data axis, by name."""
        return {p.name: v for p, v in zip(self.pieces, values, strict=True)}

    def scatter(self, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """What `gather` undoes: each piece's own part of the named tensors."""
        return [tensors[p.name] for p in self.pieces]


def apply_data(model, axis: Axis, plan) -> DataParallel:
    """The data-parallel strategy that the plan names, for a model that all other strategies have already edited."""
    return DataParallel(model, axis)


def check(config, plan, rows: int, length: int) -> None:
    """Any number of replicas can share any number of rows; nothing to refuse beyond the plan's own checks."""
