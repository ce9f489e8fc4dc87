"""Checkers of lesson 05: shards of a flat buffer, a step of ZeRO, bytes held, Muon by rows."""

import torch

from ...parallel.muon import orthogonalised
from ...parallel.zero.costs import paper_bytes
from ...ranks import comm
from ...ranks.mesh import Axis, Mesh
from . import close, closed, live, returned
from .engine import Task, by_chance, called
from .pretended import together
from .watching import memories


def shard(answer) -> None:
    """Exercise: the part of a flat buffer that a rank owns, padded to equal length."""
    for elements, ranks in ((8, 2), (6, 3), (7, 3), (10, 4), (9, 4), (2, 3)):
        _shards_of(answer, elements, ranks)
    by_chance(lambda chance: _shards_of(answer, chance.randint(1, 40), chance.randint(1, 8)))


def _shards_of(answer, elements: int, ranks: int) -> None:
    what, flat = (
        f"{elements} elements, {ranks} ranks",
        torch.arange(1.0, elements + 1, dtype=torch.float64) / 3,
    )
    parts = [returned(called(answer, (flat.clone(), rank, ranks), what)) for rank in range(ranks)]
    lengths = [len(p) for p in parts]
    assert len(set(lengths)) == 1, f"{what}: shards of {lengths}; pad to equal lengths"
    whole = torch.cat(parts)
    assert len(whole) >= elements, f"{what}: only {len(whole)} are in a shard; round up"
    least = -(-elements // ranks)
    assert lengths[0] == least, (
        f"{what}: shards of {lengths[0]}, but {least} are enough; padding costs memory"
    )
    close(whole[:elements], flat, f"{what}: shards joined in the order of ranks")
    close(whole[elements:], torch.zeros(len(whole) - elements), "padding must be zero", 1e-10 * 1e300)


def step(answer) -> None:
    """Exercise: one step of ZeRO-1 with plain gradient descent, on pretended ranks that all run the answer."""
    for ranks, each, rate in ((3, 3, 0.5), (2, 4, 0.25)):
        _one_step(answer, ranks, each, rate, 1)
    by_chance(
        lambda chance: _one_step(
            answer, chance.choice((1, 7, 8)), chance.randint(1, 5), 0.1, chance.randint(2, 99)
        ),
        3,
    )


def _one_step(answer, ranks: int, each: int, rate: float, seed: int) -> None:
    elements, generator = ranks * each, torch.Generator().manual_seed(seed)
    start, *grads = (
        torch.randn(elements, dtype=torch.float64, generator=generator) for _ in range(ranks + 1)
    )
    total = sum(grads)
    want, averaged = start - rate * total, start - rate * total / ranks

    def on(rank: int, exchange):
        used, own = [], slice(rank * each, (rank + 1) * each)

        def reduce_scatter(whole):
            used.append("reduce_scatter")
            assert len(whole) == elements, (
                f"reduce_scatter wants the whole gradient ({elements}), got {len(whole)}"
            )
            return sum(exchange(whole.clone()))[own]

        def all_gather(mine):
            used.append("all_gather")
            assert len(mine) == each, f"all_gather wants your shard ({each} weights), got {len(mine)}"
            assert ranks == 1 or not torch.allclose(mine, total[own]), (
                "you gather gradients, and every rank then updates all weights: gather updated weights"
            )
            return torch.cat(exchange(mine.clone()))

        got = answer(start.clone(), grads[rank].clone(), rank, ranks, rate, reduce_scatter, all_gather)
        return returned(got), used, own

    for rank, (got, used, own) in enumerate(together(on, ranks)):
        assert used == ["reduce_scatter", "all_gather"], (
            f"you called {used}; ZeRO reduce-scatters the gradient, steps its shard, and all-gathers the weights"
        )
        assert not torch.allclose(got[own], start[own]), f"rank {rank}'s own shard did not move"
        assert ranks == 1 or not torch.allclose(got[own], averaged[own]), (
            "gradients are summed here, not averaged"
        )
        close(got[own], want[own], f"weights after the step, on rank {rank}")
        close(got, want, f"all weights after the step, on rank {rank}")


SHAPES = ((8, 6), (9, 8), (7, 9))
"""Weights (out, in) of the stack in which `linear` is tried; none of them divides evenly by three ranks' shards."""

WEIGHT = 40 * 8
"""Bytes of memory that could be a whole weight, of 48 numbers or more; shards and activations have fewer than 40."""


def linear(answer) -> None:
    """Exercise: a linear layer whose weight is gathered for forward and again for backward, on three live ranks."""
    from . import live

    x, weights = _stack()
    weights = [w.requires_grad_() for w in weights]
    (_through(x, weights, lambda h, w: h @ w.T)).backward()
    found = live(_on_shards, answer, ranks=3, what="three live ranks")
    sizes = [-(-w.numel() // 3) * 3 * 8 for w in weights]
    best, done = 2 * 2 * sum(7 * w.numel() for w in weights), sum(flops for *_, flops in found)
    assert done <= best, (
        f"in backward the ranks compute {done} operations, dx and dW are {best}: here the layer does not run again"
    )
    for rank, (grads, calls, saved, alive, _) in enumerate(found):
        assert not saved, (
            f"rank {rank} saves {saved} whole weights for backward: save the shard, and gather once more in backward"
        )
        assert not alive, (
            f"rank {rank} still holds {alive} whole weights between forward and backward: free them"
        )
        for number, (w, got) in enumerate(zip(weights, grads, strict=True)):
            length = -(-w.numel() // 3)
            padded = torch.cat([w.grad.flatten(), w.grad.new_zeros(3 * length - w.numel())])
            assert got is not None, f"the shard of layer {number} has no gradient"
            close(
                got,
                padded[rank * length :][:length],
                f"layer {number}: the gradient of rank {rank}'s shard",
                1e-9,
            )
        sent = sum(size for _, size, _ in calls.values())
        best = (
            3 * sum(sizes) * 2 // 3
        )  # gathered twice and reduce-scattered once, (n - 1)/n of all bytes each
        assert sent == best, (
            f"rank {rank} sent {sent} bytes. Two all-gathers and one reduce-scatter a layer make {best}"
        )


def _stack():
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)
    return draw(7, SHAPES[0][1]), [draw(*shape) for shape in SHAPES]


def _through(x, weights, layer):
    for w in weights:
        x = layer(x, w).tanh()
    return x.square().sum()


def _on_shards(rank, world_size, answer):
    """(gradients of shards, calls, whole weights saved by autograd, whole weights alive, operations of backward)."""
    from torch.utils.flop_counter import FlopCounterMode

    from ...ranks import comm
    from ...ranks.mesh import Mesh

    axis, (x, weights), shards = Mesh(dp=world_size)["dp"], _stack(), []
    for w in weights:
        length = -(-w.numel() // world_size)
        padded = torch.cat([w.flatten(), w.new_zeros(length * world_size - w.numel())])
        shards.append(padded[rank * length :][:length].clone().requires_grad_())
    del w, padded, weights
    pairs, saved = list(zip(shards, SHAPES, strict=True)), []
    pack = lambda t: saved.append(t.untyped_storage().nbytes() >= WEIGHT) or t
    comm.clear_log()
    before = memories(WEIGHT)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = _through(
            x.tensor_split(world_size)[rank].clone(), pairs, lambda h, pair: answer(h, *pair, axis)
        )
    alive = len(memories(WEIGHT) - before)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return [s.grad for s in shards], comm.traffic(), sum(saved), alive, counter.get_total_flops()


bytes_held = Task(
    lambda parameters, ranks, stage: paper_bytes(parameters, ranks)[stage] / 1e9,
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
    x = torch.randn(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
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
    for rank, (_, sent, same) in enumerate(found):
        assert sent <= size, (
            f"rank {rank} sent {sent} bytes; sums of small products take {size}: who gathers?"
        )
        assert same, "you changed the rows that you were given"


def _rows_on_a_rank(rank, world_size, answer, x):
    axis, mine = Mesh(tp=world_size)["tp"], x.tensor_split(world_size)[rank].clone()
    comm.clear_log()
    with closed("gpt2lab.parallel"):
        found = answer(mine, axis)
    return (
        found,
        sum(size for _, size, _ in comm.traffic().values()),
        torch.equal(mine, x.tensor_split(world_size)[rank]),
    )
