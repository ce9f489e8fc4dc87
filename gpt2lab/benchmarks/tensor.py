"""Our tensor parallelism compared with PyTorch's (DTensor), on the same GPT-2.

Both cut the same layers, the embedding, the head and the loss, take turns in the same ranks, and use fused AdamW.
PyTorch's version gets its fused q, k, v rows in the order that it needs, because it cuts a matrix in one piece.
"""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import parallel as dtensor

from ..model import GPT2, PRESETS, GPT2Config
from ..parallel import spec
from ..parallel.tensor import apply_tensor
from ..ranks.mesh import Mesh
from ..verify import relative_error
from . import race, rivals
from .race import Contest, Heat
from .step import stepper


def run(args) -> dict[str, float]:
    """Print medians and ratios for each number of ranks, and how far the gradients are apart."""
    print(f"one step of {args.config}, B={args.rows}, T={args.length}, float32, one thread a rank")
    print(rivals.carriers(args.over))
    given, notes = (PRESETS[args.config], args.rows, args.length, args.over), race.apart("DTensor")
    heats = (Heat(f"{{}}, {n} ranks", contest, given, n, ("DTensor",), notes) for n in args.ranks)
    return race.run(heats, args.rounds)


def contest(rank: int, world_size: int, config: GPT2Config, rows: int, length: int, over: str) -> Contest:
    """A step of ours and of DTensor's on one rank; the fact is the largest relative difference of a gradient."""
    mesh, batch = Mesh(tp=world_size), torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (rows, length + 1), generator=batch)
    x, y = tokens[:, :-1], tokens[:, 1:]
    ours, theirs = GPT2(config), dtensor_model(config, rivals.rival_mesh(over))
    apply_tensor(ours, mesh)

    def their_step():
        with dtensor.loss_parallel():
            loss = F.cross_entropy(theirs(x).flatten(0, 1), y.flatten(), reduction="sum") / y.numel()
            loss.backward()

    (ours.loss(ours(x), y) / y.numel()).backward()
    their_step()
    apart = difference(ours, theirs, config, mesh)
    optimizer = their_optimizer(theirs)
    for contestant in (ours, optimizer):  # as after each step: while one runs, the other's memory is needed
        contestant.zero_grad()

    def their_whole_step():
        their_step()
        optimizer.step()
        optimizer.zero_grad()

    our_step = stepper(ours, lambda: ours.loss(ours(x), y) / y.numel())
    return Contest({"ours": our_step, "DTensor": their_whole_step}, facts=lambda: apart)


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
    return torch.optim.AdamW([{"params": cut}, {"params": whole}], lr=1e-4, fused=True)


def difference(ours: GPT2, theirs: GPT2, config: GPT2Config, mesh: Mesh) -> float:
    """The largest relative difference of a gradient, tensor by tensor, each put together whole."""
    order, worst = qkv_order(config.n_embd, mesh["tp"].size), 0.0
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        mine = spec.full(p.grad, spec.of(p), mesh)
        other = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
        mine = mine[order] if "c_attn" in name else mine
        worst = max(worst, relative_error(mine, other))
    return worst
