"""What the tests of tensor and sequence parallelism run on the ranks."""

from collections import Counter

import torch

from gpt2lab.lessons.labs.instruments import kept_for_backward
from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.parallel.sequence import apply_sequence
from gpt2lab.parallel.tensor import apply_tensor
from gpt2lab.planner.tensor_costs import step_bytes
from gpt2lab.ranks import comm
from gpt2lab.ranks.mesh import Mesh

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=4, n_embd=24)


def tokens_and_targets(config, rows, length):
    generator = torch.Generator().manual_seed(5)
    block = torch.randint(config.vocab_size, (rows, length + 1), generator=generator)
    return block[:, :-1], block[:, 1:]


def cut_model(mesh, config, sp, lean, dtype=torch.float64):
    """The model, cut over the tensor axis of the mesh."""
    model = GPT2(config).to(dtype)
    apply_tensor(model, mesh)
    if sp:
        apply_sequence(model, mesh, lean=lean)
    return model


def step_traffic(rank, world_size, config, rows, length, sp, lean):
    """Bytes sent in one forward and backward, by operation."""
    model = cut_model(Mesh(tp=world_size), config, sp, lean)
    tokens, targets = tokens_and_targets(config, rows, length)
    comm.clear_log()
    model.loss(model(tokens), targets).backward()
    return Counter({op: size for (op, _), (_, size, _) in comm.traffic().items()})


def of_a_layer(shape, rank=0, sp=False, lean=True):
    """Bytes that a rank sends for one layer and step, by formula."""
    return step_bytes(shape, 1, rank, sp, lean) - step_bytes(shape, 0, rank, sp, lean)


def bytes_kept(model, run) -> int:
    """Bytes that `run` keeps for backward, each storage once, parameters not counted."""
    return sum(kept_for_backward(run, model.parameters())[1].values())


def kept_of_a_layer(rank, world_size, config, rows, length, dtype, sp, lean):
    """Bytes that one block keeps for backward."""
    model = cut_model(Mesh(tp=world_size), config, sp, lean, dtype)
    mine = len(torch.arange(length).tensor_split(world_size)[rank]) if sp else length
    x = torch.randn(rows, mine, config.n_embd, dtype=dtype, requires_grad=True)
    return bytes_kept(model, lambda: model.h["0"](x, torch.arange(length)))
