"""Checkers of lesson 05: shards of a flat buffer, ZeRO-2's step, and bytes held."""

import torch

from ...parallel.zero.costs import paper_bytes
from . import close


def shard(answer) -> None:
    """Exercise: the part of a flat buffer that a rank owns, padded to equal length."""
    for elements, ranks in ((6, 3), (7, 3), (10, 4)):
        flat = torch.arange(1.0, elements + 1, dtype=torch.float64)
        parts = [answer(flat.clone(), rank, ranks) for rank in range(ranks)]
        assert all(p is not None for p in parts), "your function returned None. Is the return missing?"
        lengths = [len(p) for p in parts]
        assert len(set(lengths)) == 1, (
            f"{elements} elements, {ranks} ranks: shards of {lengths}; pad to equal lengths"
        )
        whole = torch.cat(parts)
        assert len(whole) >= elements, (
            f"{elements} elements, {ranks} ranks: only {len(whole)} are in a shard; round up"
        )
        close(
            whole[:elements], flat, f"{elements} elements, {ranks} ranks: shards joined in the order of ranks"
        )
        close(whole[elements:], torch.zeros(len(whole) - elements), "padding must be zero", 1e-10 * 1e300)


def step(answer) -> None:
    """Exercise: one step of ZeRO-2 with plain gradient descent, on pretended ranks."""
    ranks, elements, rate = 3, 9, 0.5
    torch.manual_seed(1)
    start = torch.randn(elements, dtype=torch.float64)
    grads = [torch.randn(elements, dtype=torch.float64) for _ in range(ranks)]
    want = start - rate * sum(grads)
    used = []

    def reduce_scatter(whole, rank):
        used.append("reduce_scatter")
        assert len(whole) == elements, (
            f"reduce_scatter wants the whole gradient ({elements}), got {len(whole)}"
        )
        return sum(grads)[rank * 3 : rank * 3 + 3].clone()

    for rank in range(ranks):
        updated = [want[r * 3 : r * 3 + 3] for r in range(ranks)]

        def all_gather(mine, rank=rank, updated=updated):
            used.append("all_gather")
            assert len(mine) == 3, f"all_gather wants your shard (3 weights), got {len(mine)}"
            return torch.cat([*updated[:rank], mine, *updated[rank + 1 :]])

        scatter = lambda whole, rank=rank: reduce_scatter(whole, rank)
        got = answer(start.clone(), grads[rank].clone(), rank, ranks, rate, scatter, all_gather)
        assert got is not None, "your function returned None. Is the return missing?"
        assert used[-2:] == ["reduce_scatter", "all_gather"], (
            f"you called {used}; ZeRO-2 reduce-scatters the gradient, steps its shard, and all-gathers the weights"
        )
        mine = got[rank * 3 : rank * 3 + 3]
        assert not torch.allclose(mine, start[rank * 3 : rank * 3 + 3]), (
            f"rank {rank}'s own shard did not move"
        )
        averaged = start - rate * sum(grads) / ranks
        assert not torch.allclose(mine, averaged[rank * 3 : rank * 3 + 3]), (
            "gradients are summed here, not averaged"
        )
        close(got, want, f"weights after the step, on rank {rank}")


def bytes_held(answer) -> None:
    """Exercise: the paper's bytes per rank for stages 0 to 3."""
    what = {
        0: "nothing is shared",
        1: "the 12 bytes of optimizer state are shared",
        2: "gradients too",
        3: "weights too",
    }
    for stage in range(4):
        want = paper_bytes(7.5e9, 64)[stage] / 1e9
        close(answer(7.5e9, 64, stage) / 1e9, want, f"GB in stage {stage}: {what[stage]}", 1e-9)
