"""The serial engine: micro-batches one after the other, gradients adding up (gradient accumulation)."""

import torch

from ..model import Noise
from .base import Engine


def micro_loss(model, micro, key) -> torch.Tensor:
    """The loss of one micro-batch: the sum of its token losses over the *global* number of target tokens.

    `key` is (seed, step) for dropout, or None without it.
    """
    noise = None if key is None else Noise(*key, micro.samples)
    return model.loss(model(micro.tokens, micro.positions, noise), micro.targets) / micro.total


class Alone:
    """In place of `data.Replicas` where an engine runs without replicas."""

    def last_micro(self) -> None:
        """No-op: there is nothing to send."""


class Accumulate(Engine):
    """Forward and backward of every micro-batch in turn; the engine of every plan without a pipeline.

    `sync.last_micro()` comes before the last backward, so that gradients can be sent while that backward runs.
    """

    def __init__(self, model):
        self.model = model

    def run(self, micros, key, sync) -> torch.Tensor:
        """Forward and backward of one micro-batch after the other."""
        total = 0.0
        for i, micro in enumerate(micros):
            if i == len(micros) - 1:
                sync.last_micro()
            loss = micro_loss(self.model, micro, key)
            loss.backward()
            total = total + loss.detach().double()
        return total

    def evaluate(self, micros) -> torch.Tensor:
        """This rank's part of the loss, forward only; call it without gradients."""
        return sum(micro_loss(self.model, micro, None).double() for micro in micros)
