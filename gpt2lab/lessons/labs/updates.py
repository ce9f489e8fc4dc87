"""One update of replicated flat weights from gradients on all ranks, in four ways that use different ranks.

Each takes this rank's `gradient` (P,), the `weights` (P,) that all ranks hold alike, the axis, and `step(weights,
gradient)`, which updates a part of the weights in place by its summed gradient; each returns the new weights (P,),
equal on all ranks. Its parts are traced as spans called reduce, update and broadcast.
"""

import torch

from ...ranks import comm
from ...ranks.mesh import Axis
from ...ranks.trace import span


def one_server(gradient: torch.Tensor, weights: torch.Tensor, axis: Axis, step) -> torch.Tensor:
    """Rank 0 gets the sum, updates all weights while the others wait, and sends them. Bytes per rank: 2 S or less."""
    with span("reduce", "comm"):
        total = comm.reduce(gradient, axis)
    with span("update", "update"):
        if axis.rank == 0:
            step(weights, total)
    with span("broadcast", "comm"):
        return comm.broadcast(weights, axis)


def owners(gradient: torch.Tensor, weights: torch.Tensor, axis: Axis, step) -> torch.Tensor:
    """Every rank is the server of its n-th of the weights. Bytes per rank: (n-1)/n S each way."""
    with span("reduce", "comm"):
        totals = [comm.reduce(g, axis, place) for place, g in enumerate(gradient.tensor_split(axis.size))]
    parts = list(weights.tensor_split(axis.size))
    with span("update", "update"):
        step(parts[axis.rank], totals[axis.rank])
    with span("broadcast", "comm"):
        return torch.cat([comm.broadcast(w, axis, place) for place, w in enumerate(parts)])


def everywhere(gradient: torch.Tensor, weights: torch.Tensor, axis: Axis, step) -> torch.Tensor:
    """All-reduce; then every rank makes the whole update, and nothing comes back. Bytes per rank: 2 (n-1)/n S."""
    with span("reduce", "comm"):
        total = comm.all_reduce(gradient, axis)
    with span("update", "update"):
        step(weights, total)
    return weights


def sharded(gradient: torch.Tensor, weights: torch.Tensor, axis: Axis, step) -> torch.Tensor:
    """The halves of an all-reduce with the update between them, as in ZeRO. Bytes per rank: (n-1)/n S each way."""
    with span("reduce", "comm"):
        total = comm.reduce_scatter(gradient, axis)
    mine = weights.tensor_split(axis.size)[axis.rank]
    with span("update", "update"):
        step(mine, total)
    with span("broadcast", "comm"):
        return comm.all_gather(mine, axis, sizes=comm.split_sizes(len(weights), axis.size))


WAYS = {
    "one server": one_server,
    "shared out over owners": owners,
    "all-reduce": everywhere,
    "reduce-scatter, all-gather": sharded,
}


def twenty_steps(shards: int, decay: float, dtype=torch.float64, fused: bool = False) -> torch.Tensor:
    """1003 weights after twenty steps of AdamW, cut into shards that are updated one by one."""
    draw = torch.Generator().manual_seed(0)
    first, *gradients = torch.randn(21, 1003, generator=draw, dtype=torch.float64).to(dtype)
    weights = [part.clone() for part in first.tensor_split(shards)]
    adam = torch.optim.AdamW(weights, lr=1e-2, weight_decay=decay, fused=fused)
    for gradient in gradients:
        for w, g in zip(weights, gradient.tensor_split(shards), strict=True):
            w.grad = g
        adam.step()
    return torch.cat(weights)
