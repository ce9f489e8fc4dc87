"""Double binary tree: two trees, each for half of the tensor; a leaf of one tree is an inner node of the other.

Sanders, Speck & Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"; NCCL since 2.4.
In a single tree the leaves' links down are idle; here every link carries about S in each direction.
Bytes per rank: at most 2 S (half a tensor up each tree, two halves down the one in which it has children).
Time with k chunks of each half: 2 (log2(n) + k - 1) (alpha + S/k beta), which approaches 2 S beta for a large S.
"""

import torch

from ..ranks import comm
from ..ranks.mesh import Axis


def parents(n: int) -> list[int]:
    """A binary tree over ranks 0..n-1 as the parent of each, -1 for the root; even ranks are leaves."""
    return [_parent(rank + 1, n) - 1 for rank in range(n)]


def _parent(label: int, n: int) -> int:
    """Labels 1..n: the next label whose lowest set bit is one position higher; 0 for the root, a power of two."""
    while True:
        bit = label & -label
        if bit > n:
            return 0
        label = (label & ~bit) | bit << 1
        if label <= n:
            return label


def trees(n: int) -> tuple[list[int], list[int]]:
    """Both trees as parents: the second is the first mirrored (even n) or shifted by one rank (odd n).

    So no rank has children in both.
    """
    first = parents(n)
    move = (lambda r: n - 1 - r) if n % 2 == 0 else (lambda r: (r + 1) % n)
    second = [-1] * n
    for rank, above in enumerate(first):
        second[move(rank)] = move(above) if above >= 0 else -1
    return first, second


def all_reduce(x, axis: Axis, chunks: int = 4):
    """The sum over the axis on every rank; each half is sent as `chunks`, several of them at the same time."""
    halves = x.clone().reshape(-1).tensor_split(2)
    work = list(zip(*(half.tensor_split(chunks) for half in halves), strict=True))
    both, going = trees(axis.size), []
    for pair in work:
        for tree, chunk in zip(both, pair, strict=True):
            for child in _children(tree, axis.rank):
                chunk += comm.recv(chunk, axis, child)
            if tree[axis.rank] >= 0:
                going.append(comm.isend(chunk, axis, tree[axis.rank]))
    for handle in going:  # a chunk is overwritten by the sum only after it was sent
        handle.wait()
    going = []
    for pair in work:
        for tree, chunk in zip(both, pair, strict=True):
            if tree[axis.rank] >= 0:
                chunk.copy_(comm.recv(chunk, axis, tree[axis.rank]))
            going += [comm.isend(chunk, axis, child) for child in _children(tree, axis.rank)]
    for handle in going:
        handle.wait()
    return torch.cat(halves).view(x.shape)


def _children(tree: list[int], rank: int) -> list[int]:
    return [child for child, above in enumerate(tree) if above == rank]
