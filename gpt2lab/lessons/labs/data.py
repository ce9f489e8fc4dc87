"""Programs that lesson 04 runs on live ranks besides its own code: wrong ones, the lecture's network, paced steps.

A paced step is real processes, strategies and messages, while computing sleeps and links have a set speed.
"""

import time
from dataclasses import replace
from types import SimpleNamespace

import torch

from ...corpus import Batch
from ...parallel import data
from ...parallel.zero import costs
from ...plan import Plan, build
from ...ranks import comm, paced, trace
from ...ranks.mesh import Mesh
from . import updates
from .lecture_zero3 import first_weight

# ---- five ways to be wrong, as arguments of the lesson's training loop


def own(gradient, axis):
    """The rank's own gradient, without a sum."""
    return gradient


def cut_off(batch: Batch, rank: int, n: int) -> Batch:
    """`rows // n` rows for every rank: the rest of the rows is lost."""
    each = len(batch.samples) // n
    mine = slice(rank * each, (rank + 1) * each)
    return replace(batch, tokens=batch.tokens[mine], targets=batch.targets[mine], samples=batch.samples[mine])


def average(model, axis) -> None:
    """After the update every weight becomes its mean over the ranks."""
    for p in model.parameters():
        p.data = comm.all_reduce(p.data, axis) / axis.size


BUGS = {
    "(none)": {},
    "no sync": {"summed": own},
    "no zero_grad": {"clear": False},
    "mean of means": {"total": lambda batch, mine, n: mine.targets.numel() * n},
    "weights averaged": {"summed": own, "updated": average},
    "lost rows": {"rows": cut_off},
}

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


# ---- what ranks hold and send


def first_weights(rank: int, world_size: int, text: str, config) -> tuple[int, dict[str, torch.Tensor]]:
    """How many weights this rank steps under a plan, and the whole weights of its stage, gathered."""
    plan = Plan.parse(text)
    parallel = build(plan, config, Mesh(**plan.axes), torch.float64)
    return sum(piece.tensor.numel() for piece in parallel.sync.pieces), parallel.weights()


def message_sizes(rank: int, world_size: int, text: str, config, batch: Batch) -> list[int]:
    """Bytes of each message that this rank sends in one step."""
    parallel = build(Plan.parse(text), config, Mesh(dp=world_size), torch.float64)
    comm.clear_log()
    parallel.engine.run(parallel.mine(batch), None, parallel.sync)
    parallel.sync.finish()
    parallel.sync.updated()
    return [event.bytes for event in comm.log]


# ---- paced: backward with its sums

LAYERS, BACKWARD = 8, 0.020  # seconds of each layer
SIZE = 100_000  # bytes of its gradients
LATENCY, BANDWIDTH = 0.020, SIZE / 0.008  # of an all-reduce: seconds, bytes per second


class SlowLayer(torch.autograd.Function):
    """A layer whose backward takes a set time."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with trace.span("B", "backward"):
            time.sleep(BACKWARD)
        return grad, torch.ones_like(ctx.weight)


def backward(rank: int, world_size: int, layers_each: int, overlap: bool) -> tuple[float, list]:
    """Seconds and spans of a paced backward with its sums: buckets of some layers, or blocking when it is over."""
    axis, model = Mesh(dp=world_size)["dp"], torch.nn.Module()
    model.weights = torch.nn.ParameterList(torch.zeros(SIZE // 8).double() for _ in range(LAYERS))
    sync = data.Buckets(model, axis, layers_each * SIZE) if overlap else data.Naive(model, axis)
    x = torch.zeros(1, requires_grad=True)
    comm.barrier(axis)
    trace.clear()
    begin = time.perf_counter()
    with paced.use(paced.Link(LATENCY / 2, BANDWIDTH)):  # two steps of a ring: twice the latency
        sync.last_micro()
        for weight in model.weights:
            x = SlowLayer.apply(x, weight)
        x.sum().backward()
        with trace.span("wait", "wait"):
            sync.finish()
    return time.perf_counter() - begin, trace.spans()


def predicted(layers_each: int, overlap: bool) -> float:
    """Seconds of the same by the alpha-beta model."""
    message = LATENCY + layers_each * SIZE / BANDWIDTH
    return costs.backward_and_sums(LAYERS // layers_each, LAYERS * BACKWARD, message, overlap)


def step_time(
    bucket: int, latency: float, bandwidth: float, model_bytes: float = 500e6, ranks: int = 8
) -> float:
    """Seconds of a backward of 0.2 s whose gradients leave in buckets of `bucket` bytes, by rings on the link."""
    buckets = max(1, round(model_bytes / bucket))
    ring = 2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * (model_bytes / buckets) / bandwidth
    return costs.backward_and_sums(buckets, 0.2, ring)


# ---- paced: an update

WEIGHTS = 100_000


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
    comm.barrier(axis)
    trace.clear()
    with paced.use(link):
        step = lambda weights, gradient: adamw(weights, gradient, seconds)
        weights = updates.WAYS[way](numbers(1 + rank), numbers(0), axis, step)
    return weights, {s.name: 1e3 * (s.end - s.start) for s in trace.spans(with_comm=False)}


def updated_serially(ranks: int) -> torch.Tensor:
    """The weights that every way must give: one step along the sum of all ranks' gradients."""
    weights = numbers(0)
    adamw(weights, sum(numbers(1 + rank) for rank in range(ranks)))
    return weights


def adamw_in_blocks(elements: int, block: int, steps: int = 4) -> tuple[torch.Tensor, float]:
    """AdamW on a flat buffer, block after block: the new weights, and seconds of the fastest step but the first."""
    draw = torch.Generator().manual_seed(0)
    weights, gradient = torch.randn(2, elements, generator=draw, dtype=torch.float32)
    blocks, took = list(weights.split(block)), []
    for w, g in zip(blocks, gradient.split(block), strict=True):
        w.grad = g
    optimizer = torch.optim.AdamW(blocks, lr=1e-3)
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer.step()
        took.append(time.perf_counter() - begin)
    return weights, min(took[1:])
