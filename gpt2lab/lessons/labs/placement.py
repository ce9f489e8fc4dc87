"""Lesson 16's live parts: a block whose operators run on the ranks where they are placed, layer times, cuts by hand."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import torch
import torch.nn.functional as F

from ...machine.speed import matmul_rate
from ...model import GPT2, GPT2Config
from ...parallel.pipeline import stages
from ...plan import Plan, build
from ...planner.fit import fit
from ...planner.problem import Device, gpt2_block
from ...ranks import comm, paced
from ...ranks.mesh import Mesh
from ...reference import example_batch
from ...train import Trainer
from .instruments import bytes_sent, least_seconds


def block_functions(block, config: GPT2Config, groups: int = 1) -> dict[str, Callable]:
    """What each operator of `gpt2_block` computes from the results that it reads, with a block's own weights."""
    c, part = config.n_embd, config.n_embd // groups
    weight, bias = block.attn.c_attn.weight, block.attn.c_attn.bias

    def columns(which: int, group: int) -> Callable:
        mine = slice(which * c + group * part, which * c + (group + 1) * part)
        return lambda x: F.linear(x, weight[mine], bias[mine])

    def core(*qkv):
        split = [t.unflatten(-1, (-1, block.attn.head_dim)).transpose(1, 2) for t in qkv]
        return F.scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(2)

    plus = lambda *terms: sum(terms[1:], terms[0])
    found = {"x": lambda x: 1.0 * x, "ln_1": block.ln_1, "ln_2": block.ln_2, "add": plus, "out": plus}
    for group in range(groups):
        mark = f".{group}" if groups > 1 else ""
        found |= {f"{name}{mark}": columns(which, group) for which, name in enumerate("qkv")}
        found[f"core{mark}"] = core
    found["attn.c_proj"] = lambda *cores: block.attn.c_proj(torch.cat(cores, -1))
    found["mlp.c_fc"] = lambda x: F.gelu(block.mlp.c_fc(x), approximate="tanh")
    return found | {"mlp.c_proj": block.mlp.c_proj}


class PlacedBlock:
    """A block whose operators run on the ranks where they are placed; each rank makes its own.

    A result is sent once to every other rank that reads it, and the sum of that rank's gradients comes back.
    """

    def __init__(
        self, where: Sequence[int], config: GPT2Config, shape, groups: int = 1, parallel: bool = False
    ):
        self.where, self.shape, self.axis = where, shape, Mesh(dp=max(where) + 1)["dp"]
        self.block = GPT2(config).double().h["0"]
        self.graph = gpt2_block(config, *shape[:2], groups, parallel, itemsize=8)
        functions = block_functions(self.block, config, groups)
        self.functions = [functions[op.name] for op in self.graph.operators]
        self.inputs, self.results, self.have = {}, {}, {}

    def readers(self, n: int) -> list[int]:
        """The other ranks that read an operator's result, in order."""
        return sorted({self.where[v] for v in self.graph.after[n]} - {self.where[n]})

    def forward(self, x):
        """Run this rank's operators in order; the last one's result where it is placed, None elsewhere."""
        rank = self.axis.rank
        for n, op in enumerate(self.graph.operators):
            if self.where[n] == rank:
                given = [self.have[u] for u in self.graph.before[n]] or [x]
                self.inputs[n] = [t.detach().requires_grad_() for t in given]
                self.results[n] = self.functions[n](*self.inputs[n])
                self.have[n] = self.results[n].detach()
            for other in self.readers(n):
                if rank == self.where[n]:
                    comm.isend(self.have[n], self.axis, other).wait()
                elif rank == other:
                    shape = (*self.shape[:2], op.output // (8 * self.shape[0] * self.shape[1]))
                    self.have[n] = comm.irecv(x.new_empty(shape), self.axis, self.where[n]).wait()
        return self.results.get(len(self.graph) - 1)

    def backward(self, gradient):
        """Run the gradients in the opposite order; that of x where x is placed, None elsewhere."""
        rank = self.axis.rank
        for n in reversed(range(len(self.graph))):
            pieces = [
                leaf.grad
                for v in self.graph.after[n]
                for u, leaf in zip(self.graph.before[v], self.inputs.get(v, ()), strict=False)
                if u == n
            ]
            for other in self.readers(n):
                if rank == other:
                    comm.isend(sum(pieces), self.axis, self.where[n]).wait()
                elif rank == self.where[n]:
                    pieces.append(comm.irecv(torch.empty_like(self.have[n]), self.axis, other).wait())
            if self.where[n] == rank:
                self.results[n].backward(sum(pieces) if pieces else gradient)
        return self.inputs[0][0].grad if 0 in self.inputs else None


def run_placed(rank: int, world_size: int, where, config, x, groups: int = 1, parallel: bool = False):
    """(result, gradient of x, gradients of weights, bytes sent) of a placed block; the loss is the result's sum."""
    comm.clear_log()
    placed = PlacedBlock(where, config, x.shape, groups, parallel)
    y = placed.forward(x)
    back = placed.backward(torch.ones_like(x))
    weights = {n: p.grad for n, p in placed.block.named_parameters() if p.grad is not None}
    return None if y is None else y.detach(), back, weights, bytes_sent()


def run_serially(config, x, parallel: bool = False):
    """(result, gradient of x, gradients of weights) of the model's own block, or of it with the MLP beside."""
    block = GPT2(config).double().h["0"]
    x, positions = x.clone().requires_grad_(), torch.arange(x.size(1))
    beside = lambda: x + block.attn(block.ln_1(x), positions) + block.mlp(block.ln_1(x))
    y = beside() if parallel else block(x, positions)
    y.sum().backward()
    return y.detach(), x.grad, {n: p.grad for n, p in block.named_parameters() if p.grad is not None}


def furthest(placed, serial) -> float:
    """The largest difference between ranks and the serial block: result, gradients (those of weights summed)."""
    y, back, weights = serial
    pairs = [(next(f[0] for f in placed if f[0] is not None), y)]
    pairs.append((next(f[1] for f in placed if f[1] is not None), back))
    for name, gradient in weights.items():
        pairs.append((sum(f[2][name] for f in placed if name in f[2]), gradient))
    return torch.stack([(a - b).abs().max() for a, b in pairs]).max().item()


def measured_device(sizes: Sequence[int] = (16, 32, 64, 128, 256, 512), seconds: float = 0.1):
    """(a device fitted to square products of these sizes, {size: the measured seconds}); the fastest trials count."""
    found = {size: 2 * size**3 / matmul_rate(size, seconds) for size in sizes}
    line = fit([(1, 2 * size**3, time) for size, time in found.items()]).link
    return Device(rate=line.bandwidth, launch=line.latency), found


def layer_times(config: GPT2Config, rows: int, length: int, repeat: int = 5) -> list[tuple[float, float]]:
    """Seconds of forward and backward of the embedding, every block and the head with its loss; the fastest of some."""
    model, batch = GPT2(config), example_batch(config, rows, length)
    layers = [lambda x: model.embed(batch.tokens, batch.positions)]
    layers += [lambda x, block=block: block(x, batch.positions) for block in model.h.values()]
    layers.append(lambda x: model.loss(model.head(x), batch.targets))
    best = [(math.inf, math.inf)] * len(layers)
    for _ in range(repeat):
        x = torch.zeros(rows, length, config.n_embd)
        for i, layer in enumerate(layers):
            given = x.detach().requires_grad_()
            start = time.perf_counter()
            x = layer(given)
            middle = time.perf_counter()
            x.backward(torch.ones_like(x))
            end = time.perf_counter()
            best[i] = min(best[i][0], middle - start), min(best[i][1], end - middle)
    return best


def blocks_of(bounds: Sequence[int]) -> list[range]:
    """The blocks of every stage, for bounds that count the embedding as layer 0 and the head as the last layer."""
    last = bounds[-1] - 2
    return [range(max(a - 1, 0), min(b - 1, last)) for a, b in pairwise(bounds)]


def steps_with_cuts(
    rank: int,
    world_size: int,
    cuts: Sequence[list[range]],
    config,
    rows: int,
    length: int,
    micro: int,
    links=None,
):
    """Seconds of a pipelined step with each of these cuts, the fastest of six turns, and the losses of the first."""
    plan, batch = Plan(pp=world_size, micro=micro), example_batch(config, rows, length)
    trainers, losses = [], []
    for cut in cuts:
        with patch.object(stages, "cut_layers", lambda *_, cut=cut: cut):
            trainers.append(Trainer(build(plan, config, Mesh(**plan.axes))))
        losses.append(trainers[-1].step(batch).loss)
    with paced.use(links) if links else nullcontext():
        return least_seconds([partial(one.step, batch) for one in trainers], 6), losses
