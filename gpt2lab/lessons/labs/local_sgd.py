"""DiLoCo: replicas train alone for H steps of AdamW, then agree by one step of Nesterov on how far they went.

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models". H = 1 with plain SGD inside
and outside (rate 1, no momentum) is data parallelism.
"""

import torch
import torch.nn.functional as F

from ...corpus.batches import IGNORED, Batch
from ...model import GPT2, GPT2Config
from ...ranks import comm
from ...ranks.mesh import Mesh
from .instruments import in_float64


def flat(model: GPT2) -> torch.Tensor:
    """A copy of all weights of a model as one vector (P,)."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


class Outer:
    """The outer optimizer: SGD with Nesterov momentum on the mean difference, alike on every replica."""

    def __init__(self, weights: torch.Tensor, lr: float, momentum: float):
        self.weights = torch.nn.Parameter(weights.clone())
        self.optimizer = torch.optim.SGD([self.weights], lr=lr, momentum=momentum, nesterov=momentum > 0)

    def step(self, difference: torch.Tensor) -> torch.Tensor:
        """The new common weights (P,); `difference` is the old ones minus the mean of where the replicas are."""
        self.weights.grad = difference
        self.optimizer.step()
        return self.weights.detach().clone()


def inner(model: GPT2, optimizer, batch: Batch) -> float:
    """One step of a replica on its own rows; the loss is their own mean: nobody else is asked."""
    logits = model(batch.tokens).flatten(0, 1)
    loss = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@in_float64()
def train(
    rank: int,
    world_size: int,
    config: GPT2Config,
    batches,
    every: int,
    lr=1e-3,
    outer_lr=0.7,
    momentum=0.9,
    summed=comm.all_reduce,
):
    """One replica: a sum of how far all went every `every` steps. Returns weights (P,), losses and its traffic.

    `summed(x, axis)` makes the sum, in coded messages for instance (Douillard et al. 2025, "Streaming DiLoCo").
    Bytes per rank: 2 (n-1)/n S every H steps, so H times fewer than data parallelism sends.
    """
    axis, model, losses = Mesh(dp=world_size)["dp"], GPT2(config).double(), []
    optimizer, outer = torch.optim.AdamW(model.parameters(), lr), Outer(flat(model), outer_lr, momentum)
    comm.clear_log()
    for step, batch in enumerate(batches, 1):
        losses.append(inner(model, optimizer, batch.rows(rank, world_size)))
        if step % every == 0:
            common = outer.step(summed(outer.weights.detach() - flat(model), axis) / world_size)
            torch.nn.utils.vector_to_parameters(common, model.parameters())
    return flat(model), losses, dict(comm.traffic())


def emulate(config: GPT2Config, batches, replicas: int, every: int, lr=1e-3, outer_lr=0.7, momentum=0.9):
    """The same in one process, replica after replica: the weights (P,) of the first, and everybody's losses."""
    models = [GPT2(config).double() for _ in range(replicas)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr) for model in models]
    weights, speed, losses = flat(models[0]), 0.0, [[] for _ in models]
    for step, batch in enumerate(batches, 1):
        for n, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            losses[n].append(inner(model, optimizer, batch.rows(n, replicas)))
        if step % every == 0:
            difference = weights - sum(map(flat, models)) / replicas
            speed = momentum * speed + difference
            weights = weights - outer_lr * (difference + momentum * speed)  # Nesterov looks one step ahead
            for model in models:
                torch.nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    return flat(models[0]), losses
