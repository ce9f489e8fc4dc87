"""The backward of one micro-batch through one stage, whole or in two halves.

The stage before waits for the input gradient; no rank waits for the weight gradients, so zero-bubble schedules run
them later (Qi et al. 2023). For y = x W^T the first half needs dy and W, the second x and dy. So autograd runs the
first half, without the weights, and the second half is one product for each weight matrix, by hand; between the halves
only x and dy of every linear layer are kept. On the first stage no rank waits for the input gradient either: there the
whole backward runs as the second half.
"""

from contextlib import contextmanager

import torch
import torch.nn.functional as F


class Work:
    """The graph between the input and the output of one stage, for one micro-batch.

    `x` is a leaf, the stage's input. `before` is what x was detached from where that has weights of its own
    (the embedding). `sides` are (tensor of this graph, leaf): whatever gradient the leaf has collected enters
    here too. `linears` are the layers that ran inside `noting`, and `parameters` all that may have a gradient;
    only the two halves need them.
    """

    def __init__(
        self, x: torch.Tensor, output: torch.Tensor, before=None, sides=(), linears=(), parameters=()
    ):
        self.x, self.output, self.before, self.sides = x, output, before, list(sides)
        self.linears: list[Linear] = list(linears)
        self.parameters: list[torch.Tensor] = list(parameters)
        # from the first half: parameters and their gradients
        self.kept: dict[torch.Tensor, torch.Tensor] = {}

    def backward(self, grad: torch.Tensor | None) -> torch.Tensor:
        """The whole backward: adds to the `.grad` of weights; returns the gradient of x. `grad` is None for a loss."""
        sides = [(t, leaf.grad) for t, leaf in self.sides if leaf.grad is not None]
        torch.autograd.backward([self.output, *(t for t, _ in sides)], [grad, *(g for _, g in sides)])
        if self.before is not None:
            self.before.backward(self.x.grad)
        return self.x.grad

    def input_gradient(self, grad: torch.Tensor | None) -> torch.Tensor:
        """The first half: the gradient of x. Gradients of biases and norms, which cost little, are kept for later."""
        later = {id(linear.weight) for linear in self.linears}
        now = [p for p in self.parameters if p.requires_grad and id(p) not in later]
        of_x, *grads = torch.autograd.grad(self.output, [self.x, *now], grad, allow_unused=True)
        self.kept = {p: g for p, g in zip(now, grads, strict=True) if g is not None}
        self.x = self.output = None
        return of_x

    def weight_gradient(self) -> None:
        """The second half: adds to the `.grad` of weights."""
        while self.linears:
            linear = self.linears.pop()
            torch.autograd.backward(linear.weight, linear.dy.flatten(0, -2).T @ linear.x.flatten(0, -2))
        # each alone, the last one first: a block's gradients are complete before those of the next
        while self.kept:
            parameter, grad = self.kept.popitem()
            torch.autograd.backward(parameter, grad)


class Linear:
    """A linear layer that ran: weight (out, in), x (..., in) and, once a backward has passed, dy (..., out)."""

    def __init__(self, weight: torch.Tensor, x: torch.Tensor):
        self.weight, self.x, self.dy = weight, x, None

    def keep(self, dy: torch.Tensor) -> None:
        """Remember the gradient of the output."""
        self.dy = dy


@contextmanager
def noting():
    """A list of all linear layers that run inside, each as a `Linear`.

    It replaces `F.linear`. PyTorch's own tool, a TorchFunctionMode, intercepts every call of any function, which costs
    more than splitting the backward gains on a small model.
    """
    linear, ran = F.linear, []

    def noted(x, weight, bias=None):
        y = linear(x, weight, bias)
        if y.requires_grad and weight.requires_grad:
            ran.append(Linear(weight, x.detach()))
            y.register_hook(ran[-1].keep)
        return y

    F.linear = noted
    try:
        yield ran
    finally:
        F.linear = linear
