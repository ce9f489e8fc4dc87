"""Tensor parallelism: the loss over a cut vocabulary, the overlap in backward, and DTensor as a second oracle."""

import pytest
import torch
import torch.nn.functional as F
from planting import all_planted
from tensor_cases import CONFIG, tokens_and_targets

from gpt2lab.model import GPT2
from gpt2lab.parallel import tensor
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


def overlapped(rank, world_size):
    """Gradients with and without overlap, and in which order the overlapped backward does things."""
    mesh, order, grads = Mesh(tp=world_size), [], []
    tokens, targets = tokens_and_targets(CONFIG, 3, 11)
    note = lambda word: lambda right: lambda *args: (order.append(word), right(*args))[1]

    def start(right):
        def call(*args, **kwargs):
            order.append("start" if kwargs.get("async_op") else "blocking")
            return right(*args, **kwargs)

        call.__wrapped__ = right.__wrapped__  # what calls with an adjoint ask for
        return call

    noted = (comm, "all_reduce", start), (tensor, "weight_gradients", note("weight"))
    for overlap in (False, True):
        model = GPT2(CONFIG).double()
        tensor.apply_tensor(model, mesh, overlap=overlap)
        loss = model.loss(model(tokens), targets)
        order.clear()
        with all_planted(*noted, (comm.Handle, "wait", note("wait"))):
            loss.backward()
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
