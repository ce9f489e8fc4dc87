"""The update as a graph: rewritten to shards it gives the same bits, sends the same bytes, and keeps an n-th."""

import pytest
import torch
from planting import under

from gpt2lab.lessons.labs import rewrite
from gpt2lab.lessons.labs.rewrite import UPDATE, GraphOp, Update, account
from gpt2lab.plots import zero as plots
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

SHARDED = rewrite.rewrite(UPDATE)
P, STEPS, RATE = 37, 20, 1e-2


def start() -> torch.Tensor:
    return torch.randn(P, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradients(rank: int):
    """A rank's gradients of 20 steps."""
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randn(STEPS, P, generator=generator, dtype=torch.float64)


def run_graph(rank, world_size, graph, decay):
    """The weights after 20 steps, bytes sent in one of them, and of moments kept."""
    update = Update(graph, start(), Mesh(dp=world_size)["dp"])
    for gradient in gradients(rank):
        comm.clear_log()
        update.step(gradient, RATE, decay)
    sent = sum(size for _, size, _ in comm.traffic().values())
    return update.weights, sent, sum(m.nbytes for m in update.moments)


def torch_adamw(world: int, decay: float) -> torch.Tensor:
    w = start().requires_grad_()
    optimizer = torch.optim.AdamW([w], lr=RATE, weight_decay=decay)
    for t in range(STEPS):
        w.grad = sum(gradients(rank)[t] for rank in range(world))
        optimizer.step()
    return w.detach()


def test_the_rewrite():
    assert [op.kind for op in SHARDED] == ["reduce-scatter", "update", "all-gather"]
    assert SHARDED[0].input == UPDATE[0].input and SHARDED[-1].output == UPDATE[-1].output
    assert rewrite.rewrite(SHARDED) == SHARDED


def test_a_sum_that_somebody_else_reads_as_a_whole_stays():
    graph = (*UPDATE, GraphOp("norm", "sum"))
    assert rewrite.rewrite(graph) == graph


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("world", [2, 3])
def test_both_graphs_are_torch_s_adamw(pools, world, decay):
    want = torch_adamw(world, decay)
    whole, sharded = (pools[world].run(run_graph, graph, decay) for graph in (UPDATE, SHARDED))
    for found in (*whole, *sharded):
        assert torch.allclose(found[0], want, rtol=1e-12, atol=1e-12)
    if world == 2:  # two addends have one order
        assert all(torch.equal(found[0], whole[0][0]) for found in (*whole, *sharded))
    for rank in range(world):
        for graph, found in ((UPDATE, whole[rank]), (SHARDED, sharded[rank])):
            rows = account(graph, P, world, rank, 8)
            assert (sum(row.sent for row in rows), sum(row.state for row in rows)) == found[1:]
        assert whole[rank][2] == 2 * 8 * P and sharded[rank][2] < 2 * 8 * (P / world + 1)
    assert sum(found[1] for found in sharded) == sum(found[1] for found in whole)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_adamw_on_shards_is_adamw_on_the_whole_bit_for_bit(ranks, dtype, decay):
    whole = start().to(dtype)
    shards = [shard.clone() for shard in whole.tensor_split(ranks)]
    moments = lambda w: (torch.zeros_like(w), torch.zeros_like(w))
    state, states = moments(whole), [moments(shard) for shard in shards]
    for t, gradient in enumerate(gradients(0).to(dtype), 1):
        rewrite.adamw(whole, gradient, *state, t, RATE, decay)
        for shard, own, part in zip(shards, states, gradient.tensor_split(ranks), strict=True):
            rewrite.adamw(shard, part, *own, t, RATE, decay)
    assert torch.equal(torch.cat(shards), whole)


BUGS = {
    "moments forgotten": lambda right: lambda w, g, m, v, *rest: right(w, g, m * 0, v * 0, *rest),
    "not element by element": lambda right: lambda w, g, *rest: right(w, g / g.norm(), *rest),
    "decay inside the moments": lambda right: (
        lambda w, g, m, v, t, lr, decay: right(w, g + decay * w, m, v, t, lr, 0.0)
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_mutant_of_the_update_is_noticed(pools, name):
    wrong = pools[2].run(under((rewrite, "adamw", BUGS[name]), run_graph), SHARDED, 0.01)[0]
    assert not torch.allclose(wrong[0], torch_adamw(2, 0.01), rtol=1e-6)


def test_the_figure_says_what_is_sent_kept_and_made():
    fig = plots.graphs({"before": account(UPDATE, 1000, 4, 0), "after": account(SHARDED, 1000, 4, 0)})
    texts = [text.get_text().replace("\n", " ") for text in fig.axes[0].texts]
    for text in (
        "all-reduce sends 6.0 kB",
        "update moments 8.0 kB",
        "reduce-scatter sends 3.0 kB",
        "update moments 2.0 kB",
        "all-gather sends 3.0 kB",
        "shard of the sum 1.0 kB",
    ):
        assert text in texts
