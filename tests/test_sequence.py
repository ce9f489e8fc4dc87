"""Sequence parallelism: whose gradients are partial, and what a shard without tokens sends."""

import torch
from tensor_cases import CONFIG, cut_model, tokens_and_targets

from gpt2lab.model import GPT2
from gpt2lab.parallel import spec
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh


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


def test_bytes_of_an_empty_shard_are_counted(pools):
    def gather(rank, world_size):
        comm.clear_log()
        comm.all_gather(torch.ones(1, int(rank == 0), 24), Mesh(tp=world_size)["tp"], 1, [1, 0, 0, 0])
        return comm.traffic()["all_gather", "tp"][1]

    assert pools[4].run(gather) == [96, 96, 96, 0]
