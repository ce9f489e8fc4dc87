"""Checks of comm.py that run inside ranks: every primitive against a one-line serial formula, both directions, exactly.

A case says how all ranks' inputs become all ranks' outputs in one process; autograd of that line gives the gradients
that the live ranks must find. Values are small integers in float64, so that every sum is exact and `equal` is meant.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpt2lab.ranks import comm

ROWS = [3, 1, 0, 2, 4]
"""Uneven lengths of shards, an empty one among them."""


def integers(*shape, seed: int) -> torch.Tensor:
    """Integers from -9 to 9 as float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).double()


@dataclass(frozen=True)
class Case:
    """One primitive: the live call, the serial line, inputs, and what all ranks hold alike.

    `ring` gives the bytes of (n, r) as lists of elements sent in each step of the algorithm that is counted.
    """

    live: Callable  # (x, axis) -> y
    serial: Callable  # [x of every rank] -> [y of every rank]
    rows: Callable  # (rank, n) -> rows of x
    same_input: bool = False
    same_output: bool = False
    steps: Callable = lambda n, r: []  # elements in each message that rank r sends


def cut(x, sizes, dim=0):
    return list(x.split(sizes, dim))


def shards(n):
    return ROWS[:n] if sum(ROWS[:n]) else [1] * n


def even(total, n):
    return [total // n + (i < total % n) for i in range(n)]


def gather_steps(sizes):
    """Ring all-gather: in step s rank r passes on the chunk that started s places before it."""
    n = len(sizes)
    return lambda r: [sizes[(r - s) % n] for s in range(n - 1)]


def scatter_steps(sizes):
    """Ring reduce-scatter: in step s rank r passes on the partial sum of the chunk that ends n-1-s places ahead."""
    n = len(sizes)
    return lambda r: [sizes[(r - 1 - s) % n] for s in range(n - 1)]


def all_reduce_steps(total):
    return lambda n, r: scatter_steps(even(total, n))(r) + gather_steps(even(total, n))(r)


W = 3  # columns


def root(n):
    return 1 % n


CASES = {
    "copy_to": Case(lambda x, a: comm.copy_to(x, a), lambda xs: xs, lambda r, n: 5, same_input=True),
    "reduce_from": Case(
        lambda x, a: comm.reduce_from(x, a),
        lambda xs: [sum(xs)] * len(xs),
        lambda r, n: 5,
        same_output=True,
        steps=all_reduce_steps(5 * W),
    ),
    "both": Case(
        lambda x, a: comm.reduce_from(comm.copy_to(x, a), a),
        lambda xs: [sum(xs)] * len(xs),
        lambda r, n: 4,
        steps=all_reduce_steps(4 * W),
    ),
    "all_gather": Case(
        lambda x, a: comm.all_gather(x, a, 0, shards(a.size)),
        lambda xs: [torch.cat(xs)] * len(xs),
        lambda r, n: shards(n)[r],
        steps=lambda n, r: [W * s for s in gather_steps(shards(n))(r)],
    ),
    "all_gather dim 1": Case(
        lambda x, a: comm.all_gather(x.T, a, 1),
        lambda xs: [torch.cat(xs).T] * len(xs),
        lambda r, n: 2,
        steps=lambda n, r: [2 * W] * (n - 1),
    ),
    "gather_replicated": Case(
        lambda x, a: comm.gather_replicated(x, a, 0, shards(a.size)),
        lambda xs: [torch.cat(xs)] * len(xs),
        lambda r, n: shards(n)[r],
        same_output=True,
        steps=lambda n, r: [W * s for s in gather_steps(shards(n))(r)],
    ),
    "reduce_scatter": Case(
        lambda x, a: comm.reduce_scatter(x, a, 0),
        lambda xs: cut(sum(xs), even(7, len(xs))),
        lambda r, n: 7,
        steps=lambda n, r: [W * s for s in scatter_steps(even(7, n))(r)],
    ),
    "reduce_scatter dim 1": Case(
        lambda x, a: comm.reduce_scatter(x.T, a, -1, shards(a.size)),
        lambda xs: cut(sum(xs).T, shards(len(xs)), 1),
        lambda r, n: sum(shards(n)),
        steps=lambda n, r: [W * s for s in scatter_steps(shards(n))(r)],
    ),
    "scatter_to": Case(
        lambda x, a: comm.scatter_to(x, a, 0),
        lambda xs: cut(xs[0], even(7, len(xs))),
        lambda r, n: 7,
        same_input=True,
    ),
    "broadcast": Case(
        lambda x, a: comm.broadcast(x, a, root(a.size)),
        lambda xs: [xs[root(len(xs))] * 1 for _ in xs],
        lambda r, n: 4,
        steps=lambda n, r: [] if r == (root(n) - 1) % n else [4 * W],
    ),
    "reduce": Case(
        lambda x, a: comm.reduce(x, a, root(a.size)),
        lambda xs: [sum(xs) * (r == root(len(xs))) for r in range(len(xs))],
        lambda r, n: 4,
        steps=lambda n, r: [] if r == root(n) else [4 * W],
    ),
    "scatter": Case(
        lambda x, a: comm.scatter(x, a, 0, root(a.size), shards(a.size)),
        lambda xs: cut(xs[root(len(xs))], shards(len(xs))),
        lambda r, n: sum(shards(n)),
        steps=lambda n, r: [W * s for p, s in enumerate(shards(n)) if p != r and s] if r == root(n) else [],
    ),
    "gather": Case(
        lambda x, a: comm.gather(x, a, 0, root(a.size), shards(a.size)),
        lambda xs: [torch.cat(xs) if r == root(len(xs)) else xs[r][:0] for r in range(len(xs))],
        lambda r, n: shards(n)[r],
        steps=lambda n, r: [] if r == root(n) else [W * shards(n)[r]],
    ),
    "gather dim 1": Case(
        lambda x, a: comm.gather(x.T, a, 1, root(a.size)),
        lambda xs: [torch.cat(xs).T if r == root(len(xs)) else xs[r].T[:, :0] for r in range(len(xs))],
        lambda r, n: 2,
        steps=lambda n, r: [] if r == root(n) else [2 * W],
    ),
    "ring_shift": Case(
        lambda x, a: comm.ring_shift(x, a, 2, (shards(a.size)[(a.rank - 2) % a.size], W)),
        lambda xs: [xs[(r - 2) % len(xs)] * 1 for r in range(len(xs))],
        lambda r, n: shards(n)[r],
        steps=lambda n, r: [W * shards(n)[r]] if 2 % n else [],
    ),
    "all_to_all": Case(
        lambda x, a: torch.cat(comm.all_to_all(cut(x, s := shards(a.size)), a, [(s[a.rank], W)] * a.size)),
        lambda xs: [torch.cat([cut(x, shards(len(xs)))[r] for x in xs]) for r in range(len(xs))],
        lambda r, n: sum(shards(n)),
        steps=lambda n, r: [W * s for p, s in enumerate(shards(n)) if p != r and s],
    ),
    "send and recv": Case(
        lambda x, a: pass_right(x, a),
        lambda xs: [xs[r - 1] * (r % 2 == 1) if r % 2 else xs[r] * 0 for r in range(len(xs))],
        lambda r, n: 3,
        steps=lambda n, r: [3 * W] if r % 2 == 0 and r + 1 < n else [],
    ),
}


def pass_right(x, axis):
    """Even ranks send to the odd rank on their right; everybody returns a tensor that autograd can follow."""
    if axis.rank % 2:
        return comm.recv(x * 0, axis, axis.rank - 1)
    ticket = comm.send(x, axis, axis.rank + 1) if axis.rank + 1 < axis.size else 0
    return x * 0 + ticket


def inputs(case: Case, n: int, seed: int = 1):
    return [integers(case.rows(r, n), W, seed=seed if case.same_input else seed + r) for r in range(n)]


def serially(case: Case, n: int):
    """All outputs, all output weights, and the gradients of all inputs, in one process."""
    xs = inputs(case, n)
    xs = [xs[0].requires_grad_()] * n if case.same_input else [x.requires_grad_() for x in xs]
    ys = case.serial(xs)
    ws = [integers(*y.shape, seed=100 + (0 if case.same_output else r)) for r, y in enumerate(ys)]
    pairs = list(zip(ys, ws, strict=True))[: 1 if case.same_output else n]
    total = sum((y * w).sum() for y, w in pairs)
    leaves = xs[:1] if case.same_input else xs
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return ys, ws, grads * n if case.same_input else grads


def check_directions(name: str, axis) -> None:
    """Forward and backward equal the serial line, whose gradient autograd makes: so <Ax, w> = <x, A'w> over all ranks.

    Inputs and gradients are left alone, and f(x) + x is right.
    """
    case, n, r = CASES[name], axis.size, axis.rank
    ys, ws, grads = serially(case, n)
    x = inputs(case, n)[r].requires_grad_()
    before, weight = x.detach().clone(), ws[r].clone()
    y = case.live(x, axis)
    assert torch.equal(y, ys[r]), f"{name}: forward on {n} ranks gives {y.tolist()}, not {ys[r].tolist()}"
    (grad,) = torch.autograd.grad(y, x, weight)
    assert torch.equal(grad, grads[r]), (
        f"{name}: backward on {n} ranks: {grad.tolist()}, not {grads[r].tolist()}"
    )
    assert torch.equal(x, before), f"{name}: the input was changed"
    assert torch.equal(weight, ws[r]), f"{name}: the gradient that came in was changed"
    if all(ys[p].shape == inputs(case, n)[p].shape for p in range(n)):
        x.grad = None
        (case.live(x, axis) + x).backward(weight)  # autograd hands one and the same gradient to both branches
        assert torch.equal(x.grad, grads[r] + weight), f"{name}: backward of f(x) + x is wrong"


def check_traffic(name: str, axis) -> None:
    """Bytes and messages of the forward call are those of the algorithm played through step by step."""
    case, n, r = CASES[name], axis.size, axis.rank
    x = inputs(case, n)[r]
    comm.clear_log()
    case.live(x, axis)
    steps = case.steps(n, r) if n > 1 else []
    got = sum(e.bytes for e in comm.log), sum(e.messages for e in comm.log)
    expected = 8 * sum(steps), len(steps)
    assert got == expected, f"{name}: {got} (bytes, messages) counted on {n} ranks, {expected} sent"


CHECKS = (check_directions, check_traffic)
