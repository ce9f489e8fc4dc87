"""The two contracts that a strategy can fill: an Engine runs forward and backward, a GradientSync sums gradients."""

import weakref
from abc import ABC, abstractmethod

import torch

from ..ranks.mesh import Axis, Mesh
from .finish import Piece


class Engine(ABC):
    """Runs the micro-batches of a step through this rank's part of the model."""

    norm_axis: Axis | None = None  # the ranks that update together and share a gradient norm; None: all

    @abstractmethod
    def run(self, micros, key, sync: "GradientSync") -> torch.Tensor:
        """Add the gradients of all micro-batches to `.grad`; returns this rank's part of the loss (a scalar).

        `key` is (seed, step) for dropout, or None without it. Calls `sync.last_micro()` before the last backward.
        """

    @abstractmethod
    def evaluate(self, micros) -> torch.Tensor:
        """This rank's part of the loss, forward only; call it without gradients."""

    def tie(self, pieces: list[Piece], mesh: Mesh) -> None:  # noqa: B027 - where one stage holds all, none is tied
        """Sum the gradients of parameters that another stage holds too, such as the tied embedding."""


class GradientSync(ABC):
    """Sums gradients over the data axis. `pieces` are the tensors that the optimizer of this rank steps."""

    pieces: list[Piece]

    def begin(self) -> None:  # noqa: B027 - most strategies have gradients in tensors alone
        """A step begins: forget what one before it, which was interrupted, has left."""

    def last_micro(self) -> None:  # noqa: B027 - most strategies need not know
        """The next backward is the step's last: a strategy that overlaps starts sending in it."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the sum over the axis: after this every piece's `.grad` is its part of the global gradient."""

    def updated(self) -> None:  # noqa: B027 - where the pieces are the model's own parameters
        """The optimizer has stepped the pieces: bring the new weights to where the model needs them."""

    @abstractmethod
    def whole(self, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values that belong to the pieces (weights, gradients, moments), whole over the data axis, by name."""

    def weight_memory(self) -> list[torch.Tensor]:
        """The tensors that hold what the optimizer steps on this rank."""
        return [p.tensor for p in self.pieces]

    @abstractmethod
    def gradient_memory(self) -> list[torch.Tensor]:
        """The tensors that hold gradients on this rank at this moment, for those who count bytes."""


def on_gradient(p: torch.Tensor, method, *args) -> None:
    """Call the bound `method(*args, p)` whenever backward has completed the gradient of a parameter.

    The tensor does not keep the method's object alive: Python's garbage collector cannot see what a tensor's hook
    holds, so an object that holds the tensor in turn would never be freed.
    """
    method = weakref.WeakMethod(method)
    p.register_post_accumulate_grad_hook(lambda p: method()(*args, p))
