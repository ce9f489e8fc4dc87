"""Programs that lesson 04 runs on live ranks besides its own code: wrong ones, the lecture's network, paced steps.

A paced step is real processes, strategies and messages, while computing sleeps and links have a set speed.
"""

import time

import torch

from ...corpus import Batch
from ...machine.speed import matmul_rate
from ...machine.timing import alone, trials
from ...parallel import data
from ...parallel.zero import costs
from ...ranks import comm, paced, trace
from ...ranks.mesh import Mesh
from . import updates
from .instruments import asleep, begin, built, seconds_of

# ---- what ranks hold and send


def message_sizes(rank: int, world_size: int, text: str, config, batch: Batch) -> list[int]:
    """Bytes of each message that this rank sends in one step."""
    parallel = built(text, config)
    comm.clear_log()
    parallel.engine.run(parallel.mine(batch), None, parallel.sync)
    parallel.sync.finish()
    parallel.sync.updated()
    return [event.bytes for event in comm.log]


def too_early(rank: int, world_size: int, config, batch: Batch) -> str:
    """What the package says where the last micro-batch is announced before the first of two."""
    parallel = built("dp=2", config)
    parallel.sync.last_micro()
    try:
        for micro in batch.rows(rank, 2).micro(2):
            parallel.model.loss(parallel.model(micro.tokens), micro.targets).backward()
    except RuntimeError as error:
        parallel.sync.finish()
        return str(error)


def rates(rank: int, world_size: int) -> tuple[float, float]:
    """Operations a second of this rank while all multiply, and bytes a second that it sends in a large all-reduce."""
    axis, x = Mesh(dp=world_size)["dp"], torch.ones(1 << 21, dtype=torch.float32)
    comm.barrier(axis)
    flops = matmul_rate(512, seconds=0.2)
    found = alone(trials(lambda: comm.all_reduce(x, axis), count=5, ready=lambda: comm.barrier(axis)))
    return flops, 2 * (world_size - 1) / world_size * 4 * len(x) / found.median


# ---- paced: backward with its sums

LAYERS, BACKWARD = 8, 0.020  # seconds of each layer
SIZE = 100_000  # bytes of its gradients
LATENCY, BANDWIDTH = 0.020, SIZE / 0.008  # of an all-reduce: seconds, bytes per second


def backward(rank: int, world_size: int, layers_each: int, overlap: bool) -> tuple[float, list]:
    """Seconds and spans of a paced backward with its sums: buckets of some layers, or blocking when it is over."""
    axis, model = Mesh(dp=world_size)["dp"], torch.nn.Module()
    model.weights = torch.nn.ParameterList(torch.zeros(SIZE // 8).double() for _ in range(LAYERS))
    sync = data.Buckets(model, axis, layers_each * SIZE) if overlap else data.Naive(model, axis)
    x = torch.zeros(1, requires_grad=True)
    begin(axis)
    start = time.perf_counter()
    with paced.use(paced.Link(LATENCY / 2, BANDWIDTH)):  # two steps of a ring: twice the latency
        sync.last_micro()
        for weight in model.weights:
            x = x + weight.sum()
            x.register_hook(lambda grad: asleep("B", "backward", BACKWARD))
        x.sum().backward()
        with trace.span("wait", "wait"):
            sync.finish()
    return time.perf_counter() - start, trace.spans()


def predicted(layers_each: int, overlap: bool) -> float:
    """Seconds of the same by the alpha-beta model."""
    message = LATENCY + layers_each * SIZE / BANDWIDTH
    return costs.backward_and_sums(LAYERS // layers_each, LAYERS * BACKWARD, message, overlap)


# ---- paced: an update

WEIGHTS = 100_000
LINK = paced.Link(0.001, 8 * WEIGHTS / 0.060)  # all weights take 60 ms
PUBLISHED = {"forward, backward": 100, "reduce": 500, "broadcast": 115, "rest": 5}
"""Milliseconds, from the wiki of the Barcelona port."""


def numbers(seed: int) -> torch.Tensor:
    """Random weights or gradients."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(WEIGHTS, generator=draw, dtype=torch.float64)


def adamw(weights: torch.Tensor, gradient: torch.Tensor, seconds: float = 0.0) -> None:
    """A first step of AdamW in place, which takes `seconds` more for all WEIGHTS and less for a part."""
    time.sleep(seconds * len(weights) / WEIGHTS)
    weights.grad = gradient
    torch.optim.AdamW([weights], lr=1e-2).step()


def update(rank: int, world_size: int, way: str, link=None, seconds: float = 0.0):
    """The weights after one update in a way of `updates.WAYS`, and the milliseconds of its parts."""
    axis = Mesh(dp=world_size)["dp"]
    begin(axis)
    with paced.use(link):
        step = lambda weights, gradient: adamw(weights, gradient, seconds)
        weights = updates.WAYS[way](numbers(1 + rank), numbers(0), axis, step)
    return weights, {s.name: 1e3 * (s.end - s.start) for s in trace.spans(with_comm=False)}


def adamw_in_blocks(elements: int, block: int, steps: int = 4) -> tuple[torch.Tensor, float]:
    """AdamW on a flat buffer, block after block: the new weights, and seconds of the fastest step but the first."""
    draw = torch.Generator().manual_seed(0)
    weights, gradient = torch.randn(2, elements, generator=draw, dtype=torch.float32)
    blocks = list(weights.split(block))
    for w, g in zip(blocks, gradient.split(block), strict=True):
        w.grad = g
    optimizer = torch.optim.AdamW(blocks, lr=1e-3)
    return weights, min(seconds_of(optimizer.step, steps - 1))
