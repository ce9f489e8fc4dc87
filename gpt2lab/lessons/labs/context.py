"""Programs that lessons 10 and 11 time or get wrong on live ranks, besides their own code."""

import statistics
import time

import torch

from ...model import GPT2, GPT2Config
from ...parallel.context import halo
from ...parallel.context.exchanges import Split, apply_context
from ...parallel.context.gather import Share
from ...parallel.context.layouts import layout
from ...plan import Plan
from ...ranks import comm, trace
from ...ranks.mesh import Mesh


def timed_layers(rank: int, world_size: int, name: str, layers: int = 2, length: int = 2048) -> list:
    """Spans of real attention with a layout, forward and backward, nothing paced."""
    axis = Mesh(cp=world_size)["cp"]
    split = Split(axis, name, "kv", None)
    mine = split(length)
    q, k, v, grad = torch.randn(4, 1, 8, len(mine), 32)
    for turn in range(layers + 1):
        if turn == 1:  # the first was for warming up
            comm.barrier(axis)
            trace.clear()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        split.core(*leaves, mine, None).backward(grad)
    return trace.spans(with_comm=False)


def time_way(
    rank: int, world_size: int, way: str, width: int = 512, window: int = 64, turns: int = 30
) -> float:
    """Median seconds of one exchange of halos in a way of `halo.WAYS`."""
    axis = Mesh(cp=world_size)["cp"]
    share = Share(layout("contiguous", 128 * world_size, world_size), axis, window)
    x, took = torch.zeros(128, width), []
    for _ in range(turns):
        comm.barrier(axis)
        start = time.perf_counter()
        halo.halo_exchange(x, share, window, dim=0, way=way)
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def train_with_bug(rank: int, world_size: int, bug: str) -> float:
    """How far the embedding's gradient is from serial, relative to it, with local positions or a local count."""
    axis = Mesh(cp=world_size)["cp"]
    serial, model = (GPT2(GPT2Config(37, 16, 1, 3, 12, window=4)).double() for _ in range(2))
    tokens, targets = torch.arange(12).reshape(1, 12) % 7, torch.arange(1, 13).reshape(1, 12) % 5
    (serial.loss(serial(tokens), targets) / 12).backward()
    plan = Plan(cp=world_size, layout="unequal", exchange="halo-kv")
    mine = apply_context(model, Mesh(cp=world_size), plan)(12)
    logits = model(tokens[:, mine], torch.arange(len(mine)) if bug == "local positions" else mine)
    (model.loss(logits, targets[:, mine]) / (len(mine) if bug == "wrong normaliser" else 12)).backward()
    found = comm.all_reduce(model.wte.weight.grad, axis)
    return ((found - serial.wte.weight.grad).norm() / serial.wte.weight.grad.norm()).item()
