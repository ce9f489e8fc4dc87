"""Double binary tree: two trees, each for half of the tensor; a rank that is a leaf in one works in the other.

Sanders, Speck & Traeff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan"; NCCL since 2.4.
A single tree leaves its leaves' outgoing links idle; here every link carries about S each way.
Bytes per rank: at most 2 S (half a tensor up each tree, two halves down the one in which it has children).
Time with k pieces of each half: 2 (log2(n) + k - 1) (alpha + S/k beta), towards 2 S beta for many pieces of a large S.
"""

import torch

from ..ranks import comm
from ..ranks.mesh import Axis


def parents(n: int) -> list[int]:
    """A binary tree over ranks 0..n-1 as the parent of each, -1 for the root; even ranks are leaves."""
    return [_parent(rank + 1, n) - 1 for rank in range(n)]


def _parent(label: int, n: int) -> int:
    """Labels 1..n: the one nearby whose lowest set bit is one place higher; 0 for the root, a power of two."""
    while True:
        bit = label & -label
        if bit > n:
            return 0
        label = (label & ~bit) | bit << 1
        if label <= n:
            return label


def trees(n: int) -> tuple[list[int], list[int]]:
    """Both trees as parents: the second mirrors the first (even n) or moves it on by one (odd n).

    Thereby no rank has children in both.
    """
    first = parents(n)
    move = (lambda r: n - 1 - r) if n % 2 == 0 else (lambda r: (r + 1) % n)
    second = [-1] * n
    for rank, above in enumerate(first):
        second[move(rank)] = move(above) if above >= 0 else -1
    return first, second


def all_reduce(x, axis: Axis, pieces: int = 4):
    """The sum over the axis on every rank; `pieces` of each half are on their way at the same time."""
    halves = x.clone().reshape(-1).tensor_split(2)
    work = list(zip(*(half.tensor_split(pieces) for half in halves), strict=True))
    both, going = trees(axis.size), []
    for pair in work:
        for tree, piece in zip(both, pair, strict=True):
            for child in _children(tree, axis.rank):
                piece += comm.recv(piece, axis, child)
            if tree[axis.rank] >= 0:
                going.append(comm.isend(piece, axis, tree[axis.rank]))
    for handle in going:  # a piece is overwritten by the sum only after it has left
        handle.wait()
    going = []
    for pair in work:
        for tree, piece in zip(both, pair, strict=True):
            if tree[axis.rank] >= 0:
                piece.copy_(comm.recv(piece, axis, tree[axis.rank]))
            going += [comm.isend(piece, axis, child) for child in _children(tree, axis.rank)]
    for handle in going:
        handle.wait()
    return torch.cat(halves).view(x.shape)


def _children(tree: list[int], rank: int) -> list[int]:
    return [child for child, above in enumerate(tree) if above == rank]


def sent(n: int, rank: int, count: int, pieces: int = 4) -> list[int]:
    """Elements of each message: in each tree its pieces once up (not from the root) and once down to each child."""
    found = []
    for tree, half in zip(trees(n), comm.split_sizes(count, 2), strict=True):
        times = (tree[rank] >= 0) + len(_children(tree, rank))
        found += comm.split_sizes(half, pieces) * times
    return found
