"""The order of a sum: which bits it decides, and a product whose bits are the same however many ranks share it."""

import torch

from ...algorithms import ALL_REDUCE, doubling
from ...ranks import comm
from ...ranks.axis import Axis
from ...ranks.mesh import Mesh


def sums(rank: int, world_size: int, count: int, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """The sum of all ranks' numbers (count,) by each algorithm, by the transport, and in the order of the ranks."""
    axis = Mesh(dp=world_size)["dp"]
    x = torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=dtype)
    every = comm.all_gather(x[None], axis)
    serial = every[0]
    for other in every[1:]:
        serial = serial + other
    found = {name: module.all_reduce(x, axis) for name, module in ALL_REDUCE.items()}
    return {"in the order of the ranks": serial, "the transport": comm.all_reduce(x, axis), **found}


def differing(found: list[dict[str, torch.Tensor]]) -> list[tuple[str, float, bool]]:
    """Of what `sums` gives on each rank: name, share of numbers unlike those in order, whether all ranks agree."""
    serial, *_ = found[0].values()
    agree = lambda name: all(torch.equal(one[name], found[0][name]) for one in found)
    return [(name, (x != serial).double().mean().item(), agree(name)) for name, x in found[0].items()]


def tree(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of 2^k tensors, neighbours first."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def product_by_tree(x: torch.Tensor, w: torch.Tensor, axis: Axis, blocks: int) -> torch.Tensor:
    """Row-parallel x (T, K / n) by w (K / n, C), the same bits on 1, 2, 4 ... `blocks` ranks.

    K is cut into `blocks`, whatever n is. A rank multiplies its blocks one by one and sums them as a tree; the tree
    goes on between ranks (recursive doubling). Each rank has one thread: threads have an order of their own.
    Bytes per rank: log2(n) T C numbers; a ring sends 2 (n-1)/n T C. Zhang et al. 2025, arXiv:2511.17826.
    """
    mine = blocks // axis.size
    if blocks % axis.size or blocks & (blocks - 1) or x.size(1) % mine:
        raise ValueError(
            f"{x.size(1)} of the features on one of {axis.size} ranks are no share of {blocks} blocks that is alike on "
            "any number of ranks. Use 2, 4, 8 ... blocks and ranks, and features that they divide."
        )
    columns, rows = torch.stack(x.chunk(mine, 1)), torch.stack(w.chunk(mine))
    # Copies: a library's product may depend on where its factors lie in memory.
    parts = [a.clone() @ b.clone() for a, b in zip(columns, rows, strict=True)]
    return doubling.all_reduce(tree(parts), axis)


def row_parallel(rank: int, world_size: int, x: torch.Tensor, w: torch.Tensor, blocks: int) -> tuple:
    """A product (T, K) by (K, C) cut along K, and the bytes that it sends: with a plain sum, then by the tree."""
    axis = Mesh(tp=world_size)["tp"]
    x, w = x.chunk(world_size, 1)[rank], w.chunk(world_size)[rank]
    results = []
    for product in (lambda: comm.all_reduce(x @ w, axis), lambda: product_by_tree(x, w, axis, blocks)):
        comm.clear_log()
        results += [product(), sum(e.bytes for e in comm.log)]
    return tuple(results)
