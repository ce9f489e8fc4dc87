"""Our tensor parallelism compared with PyTorch's (DTensor), on the same GPT-2.

Both cut the same layers, the embedding, the head and the loss, and a step ends with fused AdamW. PyTorch's version gets
its fused q, k, v rows in the order that it needs, because it cuts a matrix in one piece.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import parallel as dtensor

from ..model import GPT2, PRESETS, GPT2Config
from ..parallel import spec
from . import race, rivals
from .race import Contest


def run(args) -> dict[str, float]:
    """Print medians and ratios for each number of ranks, and how far the gradients are apart."""
    return race.over_sizes(contest, args, {"ours": ("DTensor",)}, config=[PRESETS[args.config]])


def contest(rank: int, world_size: int, args) -> Contest:
    """A step of ours and of DTensor's on one rank; the fact is the largest relative difference of a gradient."""
    x, y = rivals.random_batch(args.config, args.rows, args.length)
    parallel, our_step = rivals.our_step(f"tp={world_size}", args.config, x, y, y.numel())
    theirs = dtensor_model(args.config, rivals.rival_mesh(args.over))
    optimizer = their_optimizer(theirs)
    loss = lambda: F.cross_entropy(theirs(x).flatten(0, 1), y.flatten(), reduction="sum") / y.numel()
    step = rivals.training_step(loss, optimizer)

    def their_step():
        with dtensor.loss_parallel():
            step()

    (parallel.model.loss(parallel.model(x), y) / y.numel()).backward()
    with dtensor.loss_parallel():
        loss().backward()
    order = qkv_order(args.config.n_embd, world_size)
    ours = {n: g[order] if "c_attn" in n else g for n, g in parallel.gradients().items()}
    apart = rivals.apart(ours, dict(zip(ours, map(whole_gradient, theirs.parameters()), strict=True)))
    # as after each step: while one runs, the other's memory is needed
    parallel.model.zero_grad()
    optimizer.zero_grad()
    return Contest({"ours": our_step, "DTensor": their_step}, facts=lambda: {"DTensor": apart})


def dtensor_model(config: GPT2Config, mesh) -> GPT2:
    """Our model made parallel by torch.distributed.tensor.parallel, loss and tied head included."""
    model = GPT2(config)
    for block in model.h.values():
        dtensor_block(block, mesh)
    dtensor.parallelize_module(model, mesh, {"wte": dtensor.RowwiseParallel(input_layouts=Replicate())})

    def head(x, pick=None):
        return F.linear(DTensor.from_local(model.ln_f(x), mesh, [Replicate()]), model.wte.weight)

    model.head = head
    return model


def dtensor_block(block, mesh) -> None:
    """Cut a block in place as Megatron does, by DTensor."""
    for p in (block.attn.c_attn.weight, block.attn.c_attn.bias):
        p.data = p.data[qkv_order(len(p) // 3, mesh.size())].clone()
    columns, rows = dtensor.ColwiseParallel, dtensor.RowwiseParallel
    plan = {"attn.c_attn": columns(), "attn.c_proj": rows(), "mlp.c_fc": columns(), "mlp.c_proj": rows()}
    dtensor.parallelize_module(block, mesh, plan)


def qkv_order(width: int, ranks: int) -> torch.Tensor:
    """The rows of [Q | K | V] in the order in which one contiguous cut gives every rank its part of each."""
    return torch.cat([spec.slice_of(torch.arange(3 * width), r, ranks, 0, groups=3) for r in range(ranks)])


def their_optimizer(model: GPT2) -> torch.optim.Optimizer:
    """Fused AdamW; it takes no list that mixes DTensors with other tensors, so there are two groups."""
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    return rivals.fused_adamw([{"params": cut}, {"params": whole}])


def whole_gradient(p: torch.Tensor) -> torch.Tensor:
    """A gradient of theirs, put together whole."""
    return p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
