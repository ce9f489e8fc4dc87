"""A block of GPT-2, cut as Megatron cuts it, by the sharding algebra and by PyTorch's DTensor, forward and backward.

Messages and bytes of both are counted, and our interpreter takes turns with DTensor on the same ranks.
"""

from collections import Counter

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..model import Block, GPT2Config
from ..ranks import comm
from ..sharding.gpt2 import captured_module, dimensions, plain_attention
from ..sharding.interpret import Interpreter
from ..sharding.partition import partition
from ..sharding.propagate import propagate
from ..sharding.reshard import live_axes
from . import race, rivals
from .race import Contest, Heat
from .tensor import dtensor_block


def run(args) -> dict[str, float]:
    """Print the block's messages, bytes and seconds."""
    config = GPT2Config(n_layer=1, n_head=8, n_embd=args.width)
    print(
        f"a block, C={args.width}, B={args.rows}, T={args.length}, forward and backward; {rivals.carriers(args.over)}"
    )
    return race.run(heats(args, config), args.rounds)


def heats(args, config: GPT2Config):
    """A heat for each number of ranks."""
    for n in args.ranks:
        block, program = block_program(config, args.rows, args.length, n)
        given = block, program, args.rows, args.length, config, args.over
        yield Heat(f"{{}}, {n} ranks", contest, given, n, ("DTensor",), notes)


def notes(found: race.Outcome) -> dict[str, str]:
    """What both send, and how far their results are apart."""
    counted = lambda who: f"{found.facts[0][who]} elements sent by a rank and collectives (counted)"
    apart = f"results differ by {max(fact['apart'] for fact in found.facts):.0e}"
    return {"ours": counted("ours"), "DTensor": f"{counted('theirs')}; {apart}"}


SHARES = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_gather_into_tensor": lambda n: n - 1,
    "all_to_all_single": lambda n: (n - 1) / n,
}
"""Of the tensor that a rank puts into a collective over n ranks, the part that it sends."""


class Sent(TorchDispatchMode):
    """Counts what functional collectives send from this rank, in elements, by the same formulas as ours."""

    def __init__(self):
        super().__init__()
        self.elements, self.calls = 0, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it calls again with the parts of this rank
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional" and name in SHARES:
            self.elements += int(SHARES[name](2) * args[0].numel())
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


MARKS = {"attn.c_attn.weight": "heads:x", "mlp.c_fc.weight": "ff:x"}


def block_program(config: GPT2Config, rows: int, length: int, ranks: int, dtype=torch.float32):
    """(module, program) of a block of GPT-2, forward and backward, cut by two marks over so many ranks."""
    block = Block(config, 0).to(dtype)
    block.attn.core = plain_attention
    names = {name: dimensions(name) for name, _ in block.named_parameters()} | {"x": ("batch", "seq", "embd")}
    x, mesh = torch.zeros(rows, length, config.n_embd, dtype=dtype), {"x": ranks}
    graph = captured_module(block, x, names, lambda: (torch.arange(length),))
    return block, partition(graph, propagate(graph, MARKS, mesh), mesh)


def contest(rank, world_size, block, program, rows, length, config, over) -> Contest:
    """Both on one rank; facts: elements sent and collectives of each, and how far the results are apart."""
    torch.manual_seed(0)
    dtype = next(block.parameters()).dtype
    x, grad = (torch.randn(rows, length, config.n_embd, dtype=dtype) for _ in range(2))
    given = {"x": x, "grad y": grad} | {n: p.detach() for n, p in block.named_parameters()}
    interpreter = Interpreter(program, live_axes(program.mesh))
    parts = {name: interpreter.part(name, value) for name, value in given.items()}
    ours = lambda: interpreter.run(parts, parts=True)
    comm.clear_log()
    mine = ours()
    sent = sum(e.bytes for e in comm.log) // x.element_size(), len(comm.log)
    dtensor_block(block, rivals.rival_mesh(over))
    positions = torch.arange(length)

    def theirs():
        leaf = x.detach().requires_grad_()
        y = block(leaf, positions)
        y.backward(grad)
        block.zero_grad()
        return y.detach(), leaf.grad

    with CommDebugMode() as counted, Sent() as elements:
        y, of_x = theirs()
    apart = max((mine["y"] - y).abs().max().item(), (mine["grad x"] - of_x).abs().max().item())
    facts = {"ours": sent, "theirs": (elements.elements, counted.get_total_counts()), "apart": apart}
    return Contest({"ours": ours, "DTensor": theirs}, facts=lambda: facts)
