"""A block of GPT-2, cut as Megatron cuts it, by the sharding algebra and by PyTorch's DTensor, forward and backward.

Messages and bytes of both are counted, and our interpreter takes turns with DTensor on the same ranks.
"""

from collections import Counter

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..model import Block, GPT2Config
from ..ranks import comm
from ..sharding.gpt2 import captured_module, dimensions, plain_attention
from ..sharding.interpret import Interpreter
from ..sharding.partition import partition
from ..sharding.propagate import propagate
from ..sharding.reshard import live_axes
from . import race, rivals
from .race import Contest
from .tensor import dtensor_block

MARKS = {"attn.c_attn.weight": "heads:x", "mlp.c_fc.weight": "ff:x"}


def run(args) -> dict[str, float]:
    """Print the block's messages, bytes and seconds."""
    config = GPT2Config(n_layer=1, n_head=8, n_embd=args.width)
    return race.over_sizes(contest, args, {"ours": ("DTensor",)}, config=[config])


def contest(rank: int, world_size: int, args) -> Contest:
    """Both on one rank; facts: elements sent and collectives of each, and how far the results are apart."""
    torch.manual_seed(0)
    block, program = block_program(args.config, args.rows, args.length, world_size)
    x, grad = torch.randn(2, args.rows, args.length, args.config.n_embd).unbind()
    given = {"x": x, "grad y": grad} | {n: p.detach() for n, p in block.named_parameters()}
    interpreter = Interpreter(program, live_axes(program.mesh))
    parts = {name: interpreter.part(name, value) for name, value in given.items()}
    ours = lambda: interpreter.run(parts, parts=True)
    comm.clear_log()
    mine = ours()
    sent = sum(e.bytes for e in comm.log) // x.element_size(), len(comm.log)
    dtensor_block(block, rivals.rival_mesh(args.over))
    positions = torch.arange(args.length)

    def theirs():
        leaf = x.detach().requires_grad_()
        y = block(leaf, positions)
        y.backward(grad)
        block.zero_grad()
        return y.detach(), leaf.grad

    with Sent(world_size) as theirs_sent:
        y, of_x = theirs()
    apart = max((mine["y"] - y).abs().max().item(), (mine["grad x"] - of_x).abs().max().item())
    facts = {"ours": counted(*sent), "DTensor": counted(theirs_sent.elements, theirs_sent.calls.total())}
    facts["DTensor"]["results differ by"] = apart
    return Contest({"ours": ours, "DTensor": theirs}, facts=lambda: facts)


def counted(elements: int, collectives: int) -> dict[str, str]:
    """What a rank has sent, as a fact."""
    return {"a rank sends": f"{elements} elements in {collectives} collectives (counted)"}


def block_program(config: GPT2Config, rows: int, length: int, ranks: int):
    """(module, program) of a block of GPT-2, forward and backward, cut by two marks over so many ranks."""
    block = Block(config, 0)
    block.attn.core = plain_attention
    names = {name: dimensions(name) for name, _ in block.named_parameters()} | {"x": ("batch", "seq", "embd")}
    x, mesh = torch.zeros(rows, length, config.n_embd), {"x": ranks}
    graph = captured_module(block, x, names, lambda: (torch.arange(length),))
    return block, partition(graph, propagate(graph, MARKS, mesh), mesh)


SHARES = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_gather_into_tensor": lambda n: n - 1,
    "all_to_all_single": lambda n: (n - 1) / n,
}
"""Of the tensor that a rank puts into a collective over n ranks, the part that it sends."""


class Sent(TorchDispatchMode):
    """Counts what functional collectives over n ranks send from this one, in elements, by the same formulas as ours."""

    def __init__(self, n: int):
        super().__init__()
        self.n, self.elements, self.calls = n, 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it calls again with the parts of this rank
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name in SHARES:
            self.elements += int(SHARES[name](self.n) * args[0].numel())
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))
