"""Checkers of lesson 05: shards of a flat buffer, a step of ZeRO, bytes held, Muon by rows."""

import math

import torch

from ...parallel.muon import orthogonalised
from ...parallel.zero.costs import paper_bytes
from ...ranks.mesh import Axis
from .differences import ANY, Between, Most, randoms
from .engine import Task, run_there
from .guards import PACKAGE
from .pretended import together
from .ranked import by_rank, ranked, sent
from .watching import memories


def _padded(flat: torch.Tensor, ranks: int) -> torch.Tensor:
    """(ranks, n / ranks rounded up): the shards of a flat buffer, with zeros at the end."""
    each = -(-len(flat) // ranks)
    return torch.cat([flat, flat.new_zeros(each * ranks - len(flat))]).view(ranks, each)


parts = Task(
    lambda flat, ranks: by_rank(("the shard",), [(part,) for part in _padded(flat, ranks)]),
    shown=[
        (torch.arange(1.0, elements + 1).double() / 3, ranks)
        for elements, ranks in ((8, 2), (6, 3), (7, 3), (10, 4), (9, 4), (2, 3))
    ],
    what="{0.shape[0]} elements, {1} ranks",
    closed=(PACKAGE,),
    drawn=lambda chance: (torch.arange(1.0, chance.randint(1, 40) + 1).double(), chance.randint(1, 8)),
    call=lambda answer, flat, ranks: (
        by_rank(  # the last one gets the stretch itself, which must stay as it is
            ("the shard",),
            [(answer(flat if r + 1 == ranks else flat.clone(), r, ranks),) for r in range(ranks)],
        )
    ),
)


def shard(answer) -> None:
    """Exercise: the part of a flat buffer that a rank owns, padded with zeros to equal length, and no view."""
    parts(answer)
    for n in (90, 86):
        part = torch.as_tensor(answer(torch.ones(n).half(), 4, 9))
        assert part.dtype == torch.half, f"of a stretch of float16 your shard is {part.dtype}"
        held = part.untyped_storage().nbytes() // 2
        assert held <= 10, f"right, but a view: of {n} elements {held} stay in memory behind a shard of 10"


def _draw(ranks: int, each: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (n), and the gradient of each rank (ranks, n)."""
    start, *grads = randoms(seed, (ranks + 1, ranks * each))[0]
    return start, torch.stack(grads)


CALLS = "calls", "weights after the step"


def _after(ranks: int, each: int, rate: float, seed: int) -> dict:
    start, grads = _draw(ranks, each, seed)
    calls = ANY if ranks == 1 else ["reduce_scatter", "all_gather"]
    return by_rank(CALLS, [(calls, start - rate * grads.sum(0))] * ranks)


def _stepped(answer, ranks: int, each: int, rate: float, seed: int) -> list[tuple]:
    start, grads = _draw(ranks, each, seed)

    def on(rank: int, exchange):
        used, own = [], slice(rank * each, (rank + 1) * each)

        def reduce_scatter(whole):
            used.append("reduce_scatter")
            assert whole.shape == start.shape, (
                f"reduce_scatter wants the whole gradient ({len(start)}), got {len(whole)}"
            )
            return sum(exchange(whole.clone()))[own]

        def all_gather(mine):
            used.append("all_gather")
            assert len(mine) == each, f"all_gather wants your shard ({each} weights), got {len(mine)}"
            part, total = mine.detach().double(), grads.sum(0)[own]
            by = (part @ total / (total @ total)).item()
            assert 1 in (ranks, each) or not torch.allclose(part, by * total), (
                f"you gather {'steps' if math.isclose(abs(by), rate) else 'gradients'}, and every rank then updates "
                "all weights: gather updated weights"
            )
            return torch.cat(exchange(mine.clone()))

        return used, answer(start.clone(), grads[rank].clone(), rank, ranks, rate, reduce_scatter, all_gather)

    return together(on, ranks)


step = Task(
    _after,
    shown=[(3, 3, 0.5, 1), (2, 4, 0.25, 1)],
    what="{} ranks, each with {} weights, rate {}",
    drawn=lambda chance: (chance.choice((1, 7, 8)), chance.randint(1, 5), 0.1, chance.randint(2, 99)),
    call=lambda *given: by_rank(CALLS, run_there(_stepped, *given)),
    count=3,
)
"""Exercise: one step of ZeRO-1 with plain gradient descent, on pretended ranks that all run the answer."""


SHAPES = ((8, 7), (10, 8), (7, 10))
"""Weights (out, in) of the stack in which `linear` is tried; none of them divides evenly by three ranks."""

WEIGHT = 40 * 8
"""Bytes of memory that could be a whole weight, of 56 numbers or more; shards and activations have fewer than 40."""


def _stack():
    x, *weights = randoms(0, (7, SHAPES[0][1]), *SHAPES)
    return x, weights


def _through(x, weights, layer):
    for w in weights:
        x = layer(x, w).tanh()
    return x.square().sum()


def _on_shards(axis, answer) -> tuple:
    from torch.utils.flop_counter import FlopCounterMode

    (x, weights), saved = _stack(), []
    shards = [_padded(w.flatten(), axis.size)[axis.rank].clone().requires_grad_() for w in weights]
    del weights
    pairs = list(zip(shards, SHAPES, strict=True))
    pack = lambda t: saved.append(t.untyped_storage().nbytes() >= WEIGHT) or t
    before = memories(WEIGHT)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        part = x.tensor_split(axis.size)[axis.rank].clone().requires_grad_()
        loss = _through(part, pairs, lambda h, pair: answer(h, *pair, axis))
    alive = len(memories(WEIGHT) - before)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_total_flops(), sum(saved), alive, *(s.grad for s in shards), part.grad, sent()


def _of_shards(rank: int) -> tuple:
    x, weights = _stack()
    _through(x.requires_grad_(), [w.requires_grad_() for w in weights], lambda h, w: h @ w.T).backward()
    grads = [_padded(w.grad.flatten(), 3)[rank] for w in weights]
    # gathered twice and reduce-scattered once, (n - 1)/n of all bytes each; dx and dW of 7 rows in 3 parts
    size, rows = 3 * 2 * 8 * sum(map(len, grads)), (3, 2, 2)[rank]
    most = Most(2 * 2 * rows * sum(w.numel() for w in weights))
    return most, 0, 0, *grads, x.grad.tensor_split(3)[rank], size


linear = ranked(
    (
        "operations of backward, which are dx and dW,",
        "whole weights that are saved for backward",
        "whole weights in memory between forward and backward",
        *(f"the gradient of the shard of layer {number}" for number in range(len(SHAPES))),
        "the gradient of x",
        "bytes sent, in two all-gathers and a reduce-scatter a layer,",
    ),
    _of_shards,
    _on_shards,
    3,
    shown={"three layers": ()},
    tolerance=1e-9,
)
"""Exercise: a linear layer whose weight is gathered for forward and again for backward, on three live ranks."""


SHARED = "nothing is shared", "the 12 bytes of optimizer state are shared", "gradients too", "weights too"

bytes_held = Task(
    lambda parameters, ranks, stage: sum(paper_bytes(parameters, ranks)[stage].values()) / 1e9,
    shown={
        f"GB in stage {stage}: {what}{more}": (parameters, ranks, stage)
        for parameters, ranks, more in ((7.5e9, 64, ""), (1.5e9, 8, ", of 1.5 billion parameters on 8 ranks"))
        for stage, what in enumerate(SHARED)
    },
    what="GB of {:.3g} parameters on {} ranks in stage {}",
    drawn=lambda chance: (9e9 * chance.random(), round(99 ** chance.random()), chance.randrange(4)),
    like=lambda got, words: got / 1e9,
    closed=("gpt2lab.parallel", "gpt2lab.plots"),
    tolerance=1e-9,
)
"""Exercise: the paper's bytes per rank for stages 0 to 3."""


muon_rows = ranked(
    ("its rows, of the matrix of all,", "bytes sent, in sums of small products,"),
    lambda rank, x, ranks: (
        orthogonalised([x], [None], Axis())[0].tensor_split(ranks)[rank],
        # rings of a number and five products of C x C, uneven; the numbers of one, which is symmetric, at least
        Between(
            (ranks - 1) * 8 * x.size(1) ** 2 // ranks,
            2 * (ranks - 1) * 8 * (5 * x.size(1) ** 2 + 1) // ranks + 48,
        ),
    ),
    lambda axis, answer, x, ranks: (answer(x.tensor_split(ranks)[axis.rank], axis), sent()),
    lambda x, ranks: ranks,
    "gpt2lab.parallel",
    shown={
        f"{rows} rows of {width} on {ranks} live ranks": (1024 * randoms(0, (rows, width))[0], ranks)
        for rows, width, ranks in ((60, 3, 3), (11, 4, 2))
    },
    what="{0.shape[0]} rows of {0.shape[1]} on {1} live ranks",
    drawn=lambda chance: (1024 * randoms(chance.randrange(99), (chance.randint(30, 60), 5))[0], 3),
    count=1,
    tolerance=1e-9,
)
"""Exercise: Muon's update of a tall matrix that is cut by rows over live ranks, without gathering it."""
