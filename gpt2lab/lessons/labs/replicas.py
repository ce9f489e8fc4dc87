"""The training loop of lesson 04 with a switch for each line, ways to be wrong, and the network of the lecture."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from ...corpus import Batch, Batches, shakespeare
from ...corpus.loaders import SHAPES, each_reads, joined, one_reads
from ...machine.checksum import summ
from ...ranks import comm
from ...ranks.mesh import Mesh
from .lecture_zero3 import first_weight

# ---- the lesson's training loop with a switch for each of its lines, and five ways to be wrong


def train(
    rank: int,
    world_size: int,
    source,
    make,
    steps: int = 8,
    optimizer=torch.optim.SGD,
    lr: float = 0.3,
    rows=Batch.rows,
    total=lambda batch, mine, n: batch.total,
    summed=comm.all_reduce,
    clear: bool = True,
    updated=lambda model, axis: None,
) -> tuple[list[float], list[str], dict[str, torch.Tensor]]:
    """Losses of this rank's part, checksums of the weights after each step, and at the end rank 0's weights."""
    torch.set_default_dtype(torch.float64)
    model, axis = make(), Mesh(dp=world_size)["dp"]
    step_with = optimizer(model.parameters(), lr=lr)
    losses, digests = [], []
    for step in range(steps):
        batch = source.at(step)
        mine = rows(batch, rank, world_size)
        loss = model.loss(model(mine.tokens), mine.targets) / total(batch, mine, world_size)
        old = [0 if clear or p.grad is None else p.grad for p in model.parameters()]
        step_with.zero_grad()
        loss.backward()
        for p, before in zip(model.parameters(), old, strict=True):
            p.grad = summed(p.grad, axis) + before
        step_with.step()
        updated(model, axis)
        losses.append(loss.item())
        digests.append(checksum(model))
    return losses, digests, {n: p.data for n, p in model.named_parameters()} if rank == 0 else {}


def checksum(model) -> str:
    """A checksum of all bits of all weights."""
    return summ(torch.cat([p.data.flatten() for p in model.parameters()]))


def over_ranks(runs) -> list[float]:
    """The sum of the ranks' losses at every step, of what `train` returns on each."""
    return [sum(losses) for losses in zip(*(run[0] for run in runs), strict=True)]


def apart(some, others) -> float:
    """The largest difference of two lists of numbers."""
    return float(np.max([abs(a - b) for a, b in zip(some, others, strict=True)]))


def distance(weights, others) -> float:
    """The largest difference of two dictionaries of tensors."""
    return torch.stack([(weights[name] - others[name]).abs().max() for name in weights]).max().item()


def cut_off(batch: Batch, rank: int, n: int) -> Batch:
    """`rows // n` rows for every rank: the rest of the rows is lost."""
    each = len(batch.samples) // n
    mine = slice(rank * each, (rank + 1) * each)
    return replace(batch, tokens=batch.tokens[mine], targets=batch.targets[mine], samples=batch.samples[mine])


def shakespeare_rows(rows: int, seed: int = 0) -> Batches:
    """Batches of `rows` rows of 16 tokens, of a vocabulary folded into 256."""
    return Batches(np.asarray(shakespeare()[:100_000]) % 256, rows=rows, length=16, seed=seed)


# ---- the network of the lecture


class Toy(torch.nn.Module):
    """Four layers, x W and gelu, 1024 wide, all drawn from seed 0; the loss is the sum of squares."""

    def __init__(self):
        super().__init__()
        rows = torch.empty(0, 1024, dtype=torch.float64)
        self.layers = torch.nn.ParameterList(first_weight(rows) for _ in range(4))

    def forward(self, x):
        for weight in self.layers:
            x = torch.nn.functional.gelu(x @ weight)
        return x

    def loss(self, x, _):
        """The sum of squares, which the training loop divides by the number of elements."""
        return x.square().sum()


def toy_data(rows: int = 128) -> SimpleNamespace:
    """The same batch of random numbers (rows, 1024) at every step; the lecture draws them without a seed."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 1024, generator=draw, dtype=torch.float32).double()
    return SimpleNamespace(at=lambda step: Batch(x, x, x[0], torch.arange(rows), x.numel()))


# ---- who reads the text


def same_batch(a: Batch, b: Batch) -> bool:
    """Whether two batches hold the same tokens and targets."""
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)


def load(rank: int, world_size: int, source, step: int, shape: str) -> tuple[Batch, bool]:
    """This rank's share of a batch as it reads it itself, and whether the one that rank 0 deals out is the same."""
    axis = Mesh(dp=world_size)["dp"]
    own = each_reads(source, step, axis, shape)
    return own, same_batch(own, one_reads(source, step, axis, shape))


def shares(pool, source) -> tuple[list[tuple], dict]:
    """For each shape of a share: whether all is as it should be, and which rank has which token."""
    owners, rows = {}, []
    for shape in SHAPES:
        parts, same = zip(*pool.run(load, source, 0, shape), strict=True)
        batch, owners[shape] = joined(parts)
        shifted = torch.equal(batch.targets[:, :-1], batch.tokens[:, 1:])
        rows.append((shape, all(same), same_batch(batch, source.at(0)), shifted))
    return rows, owners
