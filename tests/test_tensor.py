"""Tensor parallelism equals the serial run, sends and keeps what its formulas say, and refuses what cannot be cut."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tensor_cases import CONFIG, kept_of_a_layer, of_a_layer, step_traffic, tokens_and_targets

from gpt2lab.model import GPT2
from gpt2lab.parallel import tensor
from gpt2lab.planner import tensor_costs
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh


def loss_of_shards(rank, world_size, logits, targets):
    """The loss and this rank's slice of its gradient."""
    axis = Mesh(tp=world_size)["tp"]
    sizes = comm.split_sizes(logits.size(-1), world_size)
    mine = logits.split(sizes, -1)[rank].clone().requires_grad_()
    loss = tensor.VocabLoss(axis, tensor.first_token(logits.size(-1), axis))(mine, targets)
    (0.5 * loss).backward()
    return loss.detach(), mine.grad


@pytest.mark.parametrize("size", [37, 50257, 4])
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_vocabulary_parallel_loss_is_the_serial_one(pools, size, scale, n):
    generator = torch.Generator().manual_seed(size)
    logits = scale * torch.randn(2, 5, size, generator=generator, dtype=torch.float64)
    targets = torch.randint(size, (2, 5), generator=generator)
    targets[0, 1:3] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten(), reduction="sum")
    (0.5 * expected).backward()
    found = pools[n].run(loss_of_shards, logits, targets)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.cat([g for _, g in found], -1), whole.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("length", [11, 12])
def test_bytes_sent_are_the_formulas(pools, n, length):
    config = replace(CONFIG, n_head=12)
    shape = tensor_costs.Shape(3, length, config.n_embd, config.n_head, n, 8)
    for rank, sent in enumerate(pools[n].run(step_traffic, config, 3, length, False, True)):
        assert sent == tensor_costs.step_bytes(shape, config.n_layer, rank)
    btc = 3 * length * config.n_embd * 8
    each = [of_a_layer(shape, r)["all_reduce"] for r in range(n)]
    assert sum(each) == 4 * 2 * (n - 1) * btc  # 4 all-reduces of (B, T, C), each 2 (n-1)/n of it a rank


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_activations_kept_are_the_formula(pools, n, dtype):
    config = replace(CONFIG, n_head=12)
    shape = tensor_costs.Shape(3, 11, config.n_embd, config.n_head, n, dtype.itemsize)
    found = pools[n].run(kept_of_a_layer, config, 3, 11, dtype, False, True)
    assert found == [tensor_costs.kept_bytes(shape, rank) for rank in range(n)]


def test_one_rank_keeps_sixteen_activations():
    shape = tensor_costs.Shape(3, 11, 24, 12, 1, 8)
    assert kept_of_a_layer(0, 1, replace(CONFIG, n_head=12), 3, 11, torch.float64, False, True) == (
        tensor_costs.kept_bytes(shape)
    )
    assert tensor_costs.kept_bytes(shape) == 3 * 11 * (16 * 24 + 4 + 12) * 8


def overlapped(rank, world_size):
    """Gradients with and without overlap, and in which order the overlapped backward does things."""
    mesh, order = Mesh(tp=world_size), []
    tokens, targets = tokens_and_targets(CONFIG, 3, 11)
    right_start, right_weight, right_wait = comm.all_reduce, tensor.weight_gradients, comm.Handle.wait

    def start(*args, **kwargs):
        order.append("start" if kwargs.get("async_op") else "blocking")
        return right_start(*args, **kwargs)

    start.__wrapped__ = right_start.__wrapped__  # what calls with an adjoint ask for

    def weight(*args):
        order.append("weight")
        return right_weight(*args)

    def wait(handle):
        order.append("wait")
        return right_wait(handle)

    grads = []
    for overlap in (False, True):
        model = GPT2(CONFIG).double()
        tensor.apply_tensor(model, mesh, overlap=overlap)
        loss = model.loss(model(tokens), targets)
        comm.all_reduce, tensor.weight_gradients, comm.Handle.wait = start, weight, wait
        order.clear()
        try:
            loss.backward()
        finally:
            comm.all_reduce, tensor.weight_gradients, comm.Handle.wait = right_start, right_weight, right_wait
        grads.append([p.grad for p in model.parameters()])
    same = all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    return same, order


def test_overlap_computes_weight_gradients_while_the_sum_travels(pools):
    for same, order in pools[2].run(overlapped):
        assert same
        assert order == ["start", "weight", "wait"] * (2 * CONFIG.n_layer + 1)


def against_dtensor(rank, world_size):
    from gpt2lab.benchmarks.tensor import contest

    torch.set_default_dtype(torch.float64)
    try:
        return contest(rank, world_size, CONFIG, 3, 11, "gloo").facts()
    finally:
        torch.set_default_dtype(torch.float32)


def test_gradients_are_those_of_dtensor(pools):
    """A second oracle that shares no code with ours: torch.distributed.tensor.parallel."""
    assert max(pools[2].run(against_dtensor)) < 1e-10
