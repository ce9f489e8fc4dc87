"""Tensor and sequence parallelism: the loss over a cut vocabulary, overlap, partial gradients, rings, thresholds."""

from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from comm_checks import integers
from planting import all_planted, under
from tensor_cases import CONFIG, cut_model, of_a_layer, tokens_and_targets

from gpt2lab.lessons.labs import rings
from gpt2lab.lessons.labs.instruments import bytes_sent
from gpt2lab.lessons.labs.thresholds import laptop, machines, most_tensor_ranks, tokens_per_rank
from gpt2lab.machine.links import Link, all_reduce_time
from gpt2lab.model import GPT2
from gpt2lab.parallel import spec, tensor
from gpt2lab.planner.tensor_costs import Shape
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh
from gpt2lab.reference import default_dtype


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

    asked = Namespace(config=CONFIG, rows=3, length=11, over="gloo")
    with default_dtype(torch.float64):
        return contest(rank, world_size, asked).facts()["DTensor"]["gradients differ by"]


def test_gradients_are_those_of_dtensor(pools):
    """A second oracle that shares no code with ours: torch.distributed.tensor.parallel."""
    assert max(pools[2].run(against_dtensor)) < 1e-10


# --- sequence parallelism


def gradients(rank, world_size, lean):
    mesh = Mesh(tp=world_size)
    model = cut_model(mesh, CONFIG, True, lean)
    tokens, targets = tokens_and_targets(CONFIG, 3, 11)
    model.loss(model(tokens), targets).backward()
    return {n: (p.grad, spec.of(p).partial) for n, p in model.named_parameters()}


def test_keeping_the_gathered_input_changes_no_gradient(pools):
    lean, greedy = (pools[2].run(gradients, lean) for lean in (True, False))
    for a, b in zip(lean, greedy, strict=True):
        assert all(torch.equal(a[n][0], b[n][0]) for n in a)


def test_partial_gradients_are_those_of_norms_row_biases_and_positions(pools):
    (grads, *_), serial = pools[2].run(gradients, True), GPT2(CONFIG).double()
    tokens, targets = tokens_and_targets(CONFIG, 3, 11)
    serial.loss(serial(tokens), targets).backward()
    for name, p in serial.named_parameters():
        grad, partial = grads[name]
        expected = "ln_" in name or name.startswith("wpe") or name.endswith("c_proj.bias")
        assert partial == (("tp",) if expected else ()), name
        assert expected == (grad.shape == p.shape and not torch.allclose(grad, p.grad)), name


# --- products in parts while a ring carries the next


def in_parts(rank, world_size):
    """Whether both rings give what the calls give that they stand for, and how many bytes more they send."""
    axis, sizes = Mesh(tp=world_size)["tp"], [3, 1, 4, 2][:world_size]
    mine = integers(2, sizes[rank], 5, seed=rank)
    terms, parts = [integers(2, n, 5, seed=9 * rank + place) for place, n in enumerate(sizes)], {}
    comm.clear_log()
    rings.gathered(mine, axis, sizes, parts.__setitem__)
    found = (
        torch.cat([parts[place] for place in range(world_size)], 1),
        rings.scattered(terms.__getitem__, axis, sizes),
    )
    sent = bytes_sent()
    comm.clear_log()
    right = comm.all_gather(mine, axis, 1, sizes), comm.reduce_scatter(torch.cat(terms, 1), axis, 1, sizes)
    return all(map(torch.equal, found, right)), sent - bytes_sent()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rings_gather_and_sum_and_send_the_bytes_of_gathers_and_sums(pools, ranks):
    assert pools[ranks].run(in_parts) == [(True, 0)] * ranks


def beside(spans) -> float:
    """The share of a rank's products during which a message is on its way."""
    work, messages = ([s for s in spans if (s.lane == "comm") == lane] for lane in (False, True))
    under = sum(any(m.start < s.end and m.end > s.start for m in messages) for s in work)
    return under / len(work)


def test_messages_travel_under_products(pools):
    whole, parts = (pools[4].run(rings.two_layers, way) for way in (False, True))
    assert all(beside(spans) == 0 for spans in whole)
    # the last of a gather and the first of a sum are alone
    assert all(beside(spans) >= 6 / 8 for spans in parts)


def one_hop_less(right):
    """The ring stops before the last part has come."""
    return lambda *given: right(*given[:-1], lambda place, part: given[-1](place, part * (place != 0)))


def own_term_twice(right):
    return lambda term, axis, sizes: right(term, axis, sizes) + term(axis.rank)


BUGS = {"gathered": one_hop_less, "scattered": own_term_twice}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_noticed(pools, name):
    assert not all(equal for equal, _ in pools[2].run(under((rings, name, BUGS[name]), in_parts)))


# --- thresholds


MACHINES = (laptop(40e9, 3e9), *machines())


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_backward_takes_as_long_as_the_ring_at_the_threshold_of_data_parallelism(machine):
    weights, tokens = 1e9, tokens_per_rank("data", machine)
    ring = all_reduce_time("ring", machine.ranks, weights * machine.itemsize, Link(0, machine.bandwidth))
    assert 4 * weights * tokens / machine.rate == pytest.approx(ring)
    assert tokens_per_rank("zero3", machine) == tokens
    assert tokens_per_rank("data", machine, ranks=1) == 0


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_a_layer_computes_as_long_as_it_sends_at_the_threshold_of_tensor_parallelism(machine):
    ranks, tokens = 4, 128
    per_width = (most_tensor_ranks(machine, 2048) - 1) / 2048
    width = round((ranks - 1) / per_width) or 1
    sent = of_a_layer(Shape(1, tokens, 10_000, 8, ranks, machine.itemsize)).total() * width / 10_000
    computing = 72 * width**2 * tokens / ranks / machine.rate
    assert computing == pytest.approx(sent / machine.bandwidth, rel=0.5 / width + 1e-6)


def test_the_rings_block_is_that_of_the_paper_and_twice_that_under_a_causal_mask():
    """Liu et al. 2023, section 3: c >= F / B; their table 2 has 1.0 thousand for an A100 with NVLink."""
    _, eight, _ = MACHINES
    block = tokens_per_rank("context", eight)
    assert block == pytest.approx(eight.rate / eight.bandwidth)
    assert tokens_per_rank("context", eight, causal=True) == 2 * block
    with pytest.raises(ValueError, match="most_tensor_ranks"):
        tokens_per_rank("tensor", eight)
