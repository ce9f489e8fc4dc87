"""Checkers of lesson 05: shards of a flat buffer, a step of ZeRO, bytes held, Muon by rows."""

import torch

from ...parallel.muon import orthogonalised
from ...parallel.zero.costs import paper_bytes
from ...ranks import comm
from ...ranks.mesh import Axis, Mesh
from . import close, closed, live, returned
from .differences import Most, randoms
from .engine import Task
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
    shown={
        f"{elements} elements, {ranks} ranks": (
            torch.arange(1.0, elements + 1, dtype=torch.float64) / 3,
            ranks,
        )
        for elements, ranks in ((8, 2), (6, 3), (7, 3), (10, 4), (9, 4), (2, 3))
    },
    what="a flat buffer on {1} ranks",
    closed=(PACKAGE,),
    drawn=lambda chance: (torch.arange(1.0, chance.randint(1, 40) + 1).double(), chance.randint(1, 8)),
    call=lambda answer, flat, ranks: by_rank(
        ("the shard",), [(answer(flat.clone(), rank, ranks),) for rank in range(ranks)]
    ),
)


def shard(answer) -> None:
    """Exercise: the part of a flat buffer that a rank owns, padded with zeros to equal length, and no view."""
    parts(answer)
    held = torch.as_tensor(answer(torch.ones(90).double(), 4, 9)).untyped_storage().nbytes() // 8
    assert held <= 10, f"right, but a view: of 90 elements {held} stay in memory behind a shard of 10"


def _draw(ranks: int, each: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (n), and the gradient of each rank (ranks, n)."""
    start, *grads = randoms(seed, (ranks + 1, ranks * each))[0]
    return start, torch.stack(grads)


CALLS = "calls", "weights after the step"


def _after(ranks: int, each: int, rate: float, seed: int) -> dict:
    start, grads = _draw(ranks, each, seed)
    return by_rank(CALLS, [(["reduce_scatter", "all_gather"], start - rate * grads.sum(0))] * ranks)


def _stepped(answer, ranks: int, each: int, rate: float, seed: int) -> dict:
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
            for by, what in ((1, "gradients"), (rate, "steps"), (-rate, "steps")):
                assert ranks == 1 or not torch.allclose(mine, by * grads.sum(0)[own]), (
                    f"you gather {what}, and every rank then updates all weights: gather updated weights"
                )
            return torch.cat(exchange(mine.clone()))

        return used, answer(start.clone(), grads[rank].clone(), rank, ranks, rate, reduce_scatter, all_gather)

    return by_rank(CALLS, together(on, ranks))


step = Task(
    _after,
    shown=[(3, 3, 0.5, 1), (2, 4, 0.25, 1)],
    what="{} ranks, each with {} weights, rate {}",
    drawn=lambda chance: (chance.choice((1, 7, 8)), chance.randint(1, 5), 0.1, chance.randint(2, 99)),
    call=_stepped,
    count=3,
)
"""Exercise: one step of ZeRO-1 with plain gradient descent, on pretended ranks that all run the answer."""


SHAPES = ((8, 6), (9, 8), (7, 9))
"""Weights (out, in) of the stack in which `linear` is tried; none of them divides evenly by three ranks' shards."""

WEIGHT = 40 * 8
"""Bytes of memory that could be a whole weight, of 48 numbers or more; shards and activations have fewer than 40."""


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
        part = x.tensor_split(axis.size)[axis.rank].clone()
        loss = _through(part, pairs, lambda h, pair: answer(h, *pair, axis))
    alive = len(memories(WEIGHT) - before)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_total_flops(), sum(saved), alive, *(s.grad for s in shards), sent()


def _of_shards(rank: int) -> tuple:
    x, weights = _stack()
    _through(x, [w.requires_grad_() for w in weights], lambda h, w: h @ w.T).backward()
    grads = [_padded(w.grad.flatten(), 3)[rank] for w in weights]
    # gathered twice and reduce-scattered once, (n - 1)/n of all bytes each; dx and dW of 7 rows in 3 parts
    size, rows = 3 * 2 * 8 * sum(map(len, grads)), (3, 2, 2)[rank]
    return Most(2 * 2 * rows * sum(w.numel() for w in weights)), 0, 0, *grads, size


linear = ranked(
    (
        "operations of backward, which are dx and dW,",
        "whole weights that are saved for backward",
        "whole weights in memory between forward and backward",
        *(f"the gradient of the shard of layer {number}" for number in range(len(SHAPES))),
        "bytes sent, in two all-gathers and a reduce-scatter a layer,",
    ),
    _of_shards,
    _on_shards,
    3,
    shown={"three layers": ()},
    tolerance=1e-9,
)
"""Exercise: a linear layer whose weight is gathered for forward and again for backward, on three live ranks."""


bytes_held = Task(
    lambda parameters, ranks, stage: sum(paper_bytes(parameters, ranks)[stage].values()) / 1e9,
    shown={
        f"GB in stage {stage}: {what}{more}": (parameters, ranks, stage)
        for parameters, ranks, more in ((7.5e9, 64, ""), (1.5e9, 8, ", of 1.5 billion parameters on 8 ranks"))
        for stage, what in enumerate(
            (
                "nothing is shared",
                "the 12 bytes of optimizer state are shared",
                "gradients too",
                "weights too",
            )
        )
    },
    what="GB of {:.3g} parameters on {} ranks in stage {}",
    drawn=lambda chance: (1e8 * chance.randint(1, 99), chance.randint(1, 99), chance.randrange(4)),
    like=lambda got, words: got / 1e9,
    closed=("gpt2lab.parallel", "gpt2lab.plots"),
    tolerance=1e-9,
)
"""Exercise: the paper's bytes per rank for stages 0 to 3."""


def muon_rows(answer) -> None:
    """Exercise: Muon's update of a tall matrix that is cut by rows over three live ranks, without gathering it."""
    (x,) = randoms(0, (60, 3))
    whole, alone = (
        torch.cat([orthogonalised([p], [None], Axis())[0] for p in x.tensor_split(n)]) for n in (1, 3)
    )
    found = live(_rows_on_a_rank, answer, x, ranks=3, what="three live ranks")
    got = torch.cat([returned(rows, "your function") for rows, *_ in found])
    assert got.shape == x.shape, f"three ranks give {tuple(got.shape)} together; the matrix is (60, 3)"
    assert not torch.allclose(got, alone), (
        "each rank brought its own rows near 1: nothing of the others was asked"
    )
    close(got, whole, "the rows of all ranks", 1e-9)
    size = 2 * (3 - 1) * 8 * (5 * 3 * 3 + 1) // 3 + 48  # rings of a number and five products of 3 x 3, uneven
    for rank, (_, moved, same) in enumerate(found):
        assert moved <= size, (
            f"rank {rank} sent {moved} bytes; sums of small products take {size}: who gathers?"
        )
        assert same, "you changed the rows that you were given"


def _rows_on_a_rank(rank, world_size, answer, x):
    axis, mine = Mesh(tp=world_size)["tp"], x.tensor_split(world_size)[rank].clone()
    comm.clear_log()
    with closed("gpt2lab.parallel"):
        found = answer(mine, axis)
    return found, sent(), torch.equal(mine, x.tensor_split(world_size)[rank])
