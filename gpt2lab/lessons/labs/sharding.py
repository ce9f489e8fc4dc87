"""What lesson 14 runs beside its own code: a step of AdamW, products on grids, products cut against placed."""

import time

import torch

from ...ranks import comm
from ...ranks.mesh import Mesh
from ...reference import example_batch, example_weights, serial_gradients, serial_model
from ...sharding import products, reshard
from .instruments import bytes_sent

MLP = {
    "x": ("batch", "seq", "embd"),
    "grad y": ("batch", "seq", "embd"),
    "c_fc.weight": ("ff", "embd"),
    "c_fc.bias": ("ff",),
    "c_proj.weight": ("embd", "ff"),
    "c_proj.bias": ("embd",),
    "hidden": ("batch", "seq", "ff"),
}

BLOCK = {
    **{name: MLP[name] for name in ("x", "grad y", "hidden")},
    **{f"mlp.{name}": dims for name, dims in MLP.items() if name.startswith("c_")},
    **{f"{norm}.{kind}": ("embd",) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")},
    "attn.c_attn.weight": ("qkv", "heads", "width", "embd"),
    "attn.c_attn.bias": ("qkv", "heads", "width"),
    "attn.c_proj.weight": ("embd", "heads", "width"),
    "attn.c_proj.bias": ("embd",),
    "queries": ("batch", "heads", "seq", "width"),
    "scores": ("batch", "heads", "seq", "keys"),
}


SECONDS = 0.04
"""A product's pretended time on one rank."""


def adamw_step(config, rows: int, length: int, recipe) -> tuple[dict, dict]:
    """Inputs and results of a captured step from empty moments: loss, norm, weights, moments by plain PyTorch."""
    batch, weights = example_batch(config, rows, length), example_weights(config)
    model = serial_model(config, weights)
    loss, _, norm = serial_gradients(model, batch)
    named = dict(model.named_parameters())
    torch.nn.utils.clip_grad_norm_(named.values(), recipe.clip)
    groups = [
        {"params": [p for p in named.values() if (p.dim() >= 2) == bool(decay)], "weight_decay": decay}
        for decay in (recipe.weight_decay, 0.0)
    ]
    adamw = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
    adamw.step()
    scalars = {"total": torch.tensor(float(batch.total)).double(), "step": torch.ones(()).double()}
    given = {**weights, "tokens": batch.tokens, "targets": batch.targets, **scalars}
    want = {"loss": loss, "norm": norm} | {f"new {n}": p.detach() for n, p in named.items()}
    for kind, moment in (("m", "exp_avg"), ("v", "exp_avg_sq")):
        given |= {f"{kind} {n}": torch.zeros_like(p) for n, p in weights.items()}
        want |= {f"new {kind} {n}": adamw.state[p][moment] for n, p in named.items()}
    return given, want


def on_grids(rank, world_size, grids, a, b):
    """For each grid: is C = A B equal to serial, and the gradient of A; and elements sent, forward and backward."""
    return [_on_grid(dict(zip("xyz", grid, strict=True)), a, b) for grid in grids]


def _on_grid(mesh, a, b):
    axes = reshard.live_axes(mesh)
    part = lambda name, whole: reshard.shard(whole, products.LAYOUTS[name], axes)
    mine, other = part("A", a).requires_grad_(), part("B", b).requires_grad_()
    comm.clear_log()
    c = products.multiply(mine, other, a.size(1), axes)
    c.backward(torch.ones_like(c))
    of_a = part("A", b.sum(1).expand(a.shape))
    equal = torch.allclose(c, part("C", a @ b)) and torch.allclose(mine.grad, of_a)
    return equal, bytes_sent() // a.element_size()


def both_cut(rank, world_size, x, w1, w2):
    """Z = X W1 W2 with both products cut: columns, then rows, and an all-reduce."""
    axis = Mesh(tp=world_size)["tp"]
    part = x @ w1.tensor_split(2, 1)[rank]
    time.sleep(SECONDS)  # two halves of a product
    return comm.all_reduce(part @ w2.tensor_split(2, 0)[rank], axis)


def one_each(rank, world_size, x, w1, w2):
    """The same with one product on each rank: Y = X W1 is sent."""
    axis = Mesh(pp=world_size)["pp"]
    if rank == 0:
        time.sleep(SECONDS)
        comm.send(x @ w1, axis, 1)
        return None
    y = comm.recv(x.new_empty(len(x), w1.size(1)), axis, 0)
    time.sleep(SECONDS)
    return y @ w2


def timed_products(rank, world_size, way, *matrices):
    """(result, bytes sent, share of the time without work) of one rank."""
    comm.barrier(Mesh(dp=world_size)["dp"])
    comm.clear_log()
    start = time.perf_counter()
    z = way(rank, world_size, *matrices)
    sent = bytes_sent()
    comm.barrier(Mesh(dp=world_size)["dp"])
    return z, sent, 1 - SECONDS / (time.perf_counter() - start)
