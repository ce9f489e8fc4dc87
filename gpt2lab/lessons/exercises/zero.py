"""Checkers of lesson 05: shards of a flat buffer, a step of ZeRO, and bytes held."""

import torch

from ...parallel.zero.costs import paper_bytes
from . import close, returned, unaided


def shard(answer) -> None:
    """Exercise: the part of a flat buffer that a rank owns, padded to equal length."""
    for elements, ranks in ((8, 2), (6, 3), (7, 3), (10, 4), (9, 4), (2, 3)):
        flat = torch.arange(1.0, elements + 1, dtype=torch.float64) / 3
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
        least = -(-elements // ranks)
        assert lengths[0] == least, (
            f"{elements} elements, {ranks} ranks: shards of {lengths[0]}, but {least} are enough; padding costs memory"
        )
        close(
            whole[:elements], flat, f"{elements} elements, {ranks} ranks: shards joined in the order of ranks"
        )
        close(whole[elements:], torch.zeros(len(whole) - elements), "padding must be zero", 1e-10 * 1e300)


def step(answer) -> None:
    """Exercise: one step of ZeRO-1 with plain gradient descent, on pretended ranks."""
    for ranks, each, rate in ((3, 3, 0.5), (2, 4, 0.25)):
        _one_step(answer, ranks, each, rate)


def _one_step(answer, ranks: int, each: int, rate: float) -> None:
    elements = ranks * each
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
        return sum(grads)[rank * each :][:each].clone()

    for rank in range(ranks):
        updated = [want[r * each :][:each] for r in range(ranks)]

        def all_gather(mine, rank=rank, updated=updated):
            used.append("all_gather")
            assert len(mine) == each, f"all_gather wants your shard ({each} weights), got {len(mine)}"
            assert not torch.allclose(mine, sum(grads)[rank * each :][:each]), (
                "you gather gradients, and every rank then updates all weights: gather updated weights"
            )
            return torch.cat([*updated[:rank], mine, *updated[rank + 1 :]])

        used.clear()
        scatter = lambda whole, rank=rank: reduce_scatter(whole, rank)
        got = returned(answer(start.clone(), grads[rank].clone(), rank, ranks, rate, scatter, all_gather))
        assert used == ["reduce_scatter", "all_gather"], (
            f"you called {used}; ZeRO reduce-scatters the gradient, steps its shard, and all-gathers the weights"
        )
        own = slice(rank * each, (rank + 1) * each)
        mine = got[own]
        assert not torch.allclose(mine, start[own]), f"rank {rank}'s own shard did not move"
        averaged = start - rate * sum(grads) / ranks
        assert not torch.allclose(mine, averaged[own]), "gradients are summed here, not averaged"
        close(got, want, f"weights after the step, on rank {rank}")


SHAPES = ((8, 6), (9, 8), (7, 9))
"""Weights (out, in) of the stack in which `linear` is tried; none of them divides evenly by three ranks' shards."""


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
    pack = lambda t: saved.append(_is_large(t)) or t
    comm.clear_log()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = _through(
            x.tensor_split(world_size)[rank].clone(), pairs, lambda h, pair: answer(h, *pair, axis)
        )
    alive = _kept(loss.grad_fn)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return [s.grad for s in shards], comm.traffic(), sum(saved), alive, counter.get_total_flops()


def _is_large(t) -> bool:
    """Whether a tensor's memory could be a whole weight: 48 numbers; shards and activations have fewer than 40."""
    return t.untyped_storage().nbytes() >= 40 * 8


def _kept(node) -> int:
    """How many nodes of the graph behind `node` keep a whole weight as an attribute, such as `ctx.w`."""
    seen, found = {node}, 0
    waiting = [node]
    for here in waiting:
        values = getattr(here, "__dict__", {}).values()
        values = [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]
        found += any(isinstance(value, torch.Tensor) and _is_large(value) for value in values)
        new = [n for n, _ in here.next_functions if n is not None and n not in seen]
        seen.update(new)
        waiting += new
    return found


def bytes_held(answer) -> None:
    """Exercise: the paper's bytes per rank for stages 0 to 3."""
    answer = unaided(answer, "gpt2lab.parallel", "gpt2lab.plots")
    what = {
        0: "nothing is shared",
        1: "the 12 bytes of optimizer state are shared",
        2: "gradients too",
        3: "weights too",
    }
    for parameters, ranks, more in ((7.5e9, 64, ""), (1.5e9, 8, ", of 1.5 billion parameters on 8 ranks")):
        for stage in range(4):
            want = paper_bytes(parameters, ranks)[stage] / 1e9
            words = f"GB in stage {stage}: {what[stage]}{more}"
            close(answer(parameters, ranks, stage) / 1e9, want, words, 1e-9)
