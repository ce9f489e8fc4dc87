"""The contract of what runs forward and backward, and how a strategy hears of gradients."""

import weakref
from abc import ABC, abstractmethod

import torch

from ..ranks.mesh import Axis, Mesh
from .finish import Piece


class Engine(ABC):
    """Runs the micro-batches of a step through this rank's part of the model."""

    norm_axis: Axis | None = None  # the ranks that update together and share a gradient norm; None: all

    @abstractmethod
    def run(self, micros, key, sync) -> torch.Tensor:
        """Add the gradients of all micro-batches to `.grad`; returns this rank's part of the loss (a scalar).

        `key` is (seed, step) for dropout, or None without it. `sync` sums the gradients (`data.Replicas`): its
        `last_micro()` is called before the last backward.
        """

    @abstractmethod
    def evaluate(self, micros) -> torch.Tensor:
        """This rank's part of the loss, forward only; call it without gradients."""

    def tie(self, pieces: list[Piece], mesh: Mesh) -> None:  # noqa: B027 - where one stage holds all, none is tied
        """Sum the gradients of parameters that another stage holds too, such as the tied embedding."""


def on_gradient(p: torch.Tensor, method, *args) -> None:
    """Call the bound `method(*args, p)` whenever backward has completed the gradient of a parameter.

    The tensor does not keep the method's object alive: Python's garbage collector cannot see what a tensor's hook
    holds, so an object that holds the tensor in turn would never be freed.
    """
    method = weakref.WeakMethod(method)
    p.register_post_accumulate_grad_hook(lambda p: method()(*args, p))
