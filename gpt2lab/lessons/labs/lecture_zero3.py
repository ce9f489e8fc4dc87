"""A lecture's ZeRO-3, whose step is in lesson 05 with three bugs as switches, and the serial program it ought to equal.

Stanford's CS336 (spring 2024), lecture 8, in our words: whole layers belong to ranks, and the model is a toy, layers
of gelu(x @ w) for x (B, D) with the loss mean(x^2), trained by AdamW. No plan uses it: `data=owner` is the right one.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from ...machine import memory
from ...ranks import comm
from ...ranks.mesh import Mesh


@dataclass
class Log:
    """What a program did: by step the loss and the norm of the gradient applied, and by layer its last weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[int, torch.Tensor] = field(default_factory=dict)
    # others' layers in memory, after each broadcast and operation
    borrowed: list[int] = field(default_factory=list)

    def equals(self, other: "Log", tolerance: float = 1e-12) -> bool:
        """Whether losses, norms and the layers that this one has are those of the other."""
        mine, theirs = (torch.tensor([log.losses, log.norms]) for log in (self, other))
        close = [(mine - theirs).abs().max() <= tolerance * theirs.abs().max()]
        close += [(w - other.weights[i]).abs().max() <= tolerance for i, w in self.weights.items()]
        return all(close)


def first_weight(x: torch.Tensor) -> torch.Tensor:
    """A weight (D, D) as the lecture draws it: seed 0, the same for every layer."""
    w = torch.randn(x.size(1), x.size(1), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return (w.to(x.dtype) / x.size(1) ** 0.5).requires_grad_()


def zero3(rank, world_size, x, step, replicas=False, steps=5, layers=4, **bugs) -> Log:
    """Train on this rank's rows of x by `step(own, rows, **bugs)`, which runs forward, backward and update.

    `replicas` turns it into data parallelism: every rank has all layers, and gradients are averaged by an all-reduce.
    """
    axis, alive, log = Mesh(dp=world_size)["dp"], memory.Alive(), Log()
    owner = [i * world_size // layers for i in range(layers)]
    mine = {i: first_weight(x) for i in range(layers) if replicas or owner[i] == rank}
    adam = torch.optim.AdamW(mine.values(), lr=1e-3)

    def count():
        log.borrowed.append(alive.bytes() // (x.size(1) ** 2 * x.element_size()))

    def borrow(i):
        """Layer i's weight: one's own, or broadcast by its owner."""
        if replicas:
            return mine[i]
        own = mine[i].detach() if i in mine else x.new_empty(x.size(1), x.size(1))
        sent = comm.broadcast(own, axis, owner[i])
        if i in mine:
            return mine[i]
        alive.watch(sent)
        count()
        return sent.requires_grad_()

    def backward(i, a, grad):
        """Run layer i again, from its input; `grad` is that of its output. Returns the gradient of its input."""
        a, w = a.detach().requires_grad_(), borrow(i)
        y = F.gelu(a @ w)
        loss = y.square().mean() if grad is None else (y * grad).sum()
        loss.backward()
        total = comm.all_reduce(w.grad, axis) if replicas else comm.reduce(w.grad, axis, owner[i])
        if i in mine:
            w.grad = total / world_size  # the others' goes with the layer
        return a.grad

    own = SimpleNamespace(layers=layers, adam=adam, borrow=borrow, backward=backward, count=count)
    for _ in range(steps):
        y = step(own, x.tensor_split(world_size)[rank], **bugs)
        log.losses.append(comm.all_reduce(y.detach().square().mean(), axis).item() / world_size)
        square = _square(mine.values())
        log.norms.append((square if replicas else comm.all_reduce(square, axis)).sqrt().item())
    log.weights = {i: w.detach() for i, w in mine.items()}
    return log


def serial(x, keep: float = 0.0, frozen=(), steps: int = 5, layers: int = 4) -> Log:
    """The same on one rank, where layers in `frozen` get no gradient and the others g(t) = keep g(t-1) + gradient."""
    weights, g, log = [first_weight(x) for _ in range(layers)], [0.0] * layers, Log()
    adam = torch.optim.AdamW(weights, lr=1e-3)
    for _ in range(steps):
        y = x
        for w in weights:
            y = F.gelu(y @ w)
        loss = y.square().mean()
        for i, now in enumerate(torch.autograd.grad(loss, weights)):
            if i not in frozen:
                weights[i].grad = g[i] = keep * g[i] + now
        adam.step()
        log.losses.append(loss.item())
        log.norms.append(_square(weights).sqrt().item())
    log.weights = {i: w.detach() for i, w in enumerate(weights)}
    return log


def _square(weights) -> torch.Tensor:
    """The sum of squares of all gradients that there are."""
    squares = [torch.zeros_like(w[0, 0]) if w.grad is None else w.grad.square().sum() for w in weights]
    return torch.stack(squares).sum()
