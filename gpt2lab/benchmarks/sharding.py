"""`gpt2lab bench sharding`: the sharding algebra compared with PyTorch's DTensor.

Random einsums with random layouts on 2 x 2 ranks: where each lets the result lie, and what it sends for that. Then a
block of GPT-2, cut as Megatron cuts it, forward and backward: messages, bytes, and our interpreter's seconds beside
DTensor's, in turns.
"""

import argparse
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from ..model import Block, GPT2Config
from ..processes.launch import launch
from ..ranks import comm
from ..sharding.gpt2 import captured_module, dimensions, plain_attention
from ..sharding.interpret import Interpreter
from ..sharding.layout import Layout, layouts, local_shape, places
from ..sharding.operators import einsum
from ..sharding.partition import partition, results
from ..sharding.propagate import propagate
from ..sharding.reshard import live_axes
from . import rivals
from .step import medians
from .tensor import qkv_order

MESH = {"x": 2, "y": 2}
EINSUMS = (
    *("ik,kj->ij", "bik,bkj->bij", "ki,kj->ij", "i,j->ij"),
    *("bti,io->bto", "bto,io->bti", "bti,bto->io", "bhtd,bhsd->bhts"),
)
SIZE = 8


@dataclass(frozen=True)
class Case:
    """An einsum and the layouts of its two operands."""

    text: str
    layouts: tuple[Layout, Layout]

    @property
    def terms(self) -> list[str]:
        """The indices of the operands and of the result."""
        return self.text.replace("->", ",").split(",")


def cases(count: int, seed: int = 0) -> list[Case]:
    """So many random pairs; of the orders in which two axes cut one dimension only the one that DTensor can write."""
    pick, axes = random.Random(seed), list(MESH)
    plain = lambda one: all(list(cut) == sorted(cut) for cut in one.cuts)
    legal = {n: [one for one in layouts(n, axes) if plain(one)] for n in range(1, 5)}
    texts = [pick.choice(EINSUMS) for _ in range(count)]
    return [
        Case(t, tuple(pick.choice(legal[len(term)]) for term in t.split("->")[0].split(","))) for t in texts
    ]


EQUAL = "the same layout, the same bytes"
OTHER = "the same bytes for DTensor's layout; another layout would cost less"
DIRECT = "fewer: an all-to-all, where DTensor on CPUs gathers all and keeps a part"
SHORTER = "fewer: the shortest path over both axes, where DTensor goes axis by axis"
REFUSED = "DTensor refuses the pair, depending on how Python hashes in this process; ours runs"
KINDS = (EQUAL, OTHER, DIRECT, SHORTER, REFUSED)


def kind(case: Case, lies: Layout | None, elements: int) -> str:
    """How DTensor's result (its layout, and the elements that all ranks sent) compares with what the algebra says.

    `lies` is None where DTensor refused.
    Raises ValueError where DTensor sent less, or where the algebra does not know the layout.
    """
    if lies is None:
        return REFUSED
    *shapes, out = ((SIZE,) * len(term) for term in case.terms)
    known = results(einsum(case.text), case.layouts, shapes, out, MESH)
    cost = {layout: sum(way.total(MESH)[0] for way in ways) for layout, ways in known.items()}
    if cost.get(lies, elements + 1) > elements:
        raise ValueError(f"{case}: DTensor sent {elements} elements for {lies}, and we {cost.get(lies)}.")
    if cost[lies] == elements:
        return EQUAL if elements == min(cost.values()) else OTHER
    steps = {step.kind for way in known[lies] for step in way.steps}
    return DIRECT if "all-to-all" in steps else SHORTER


def dtensor_placements(layout: Layout) -> list:
    """The same layout as DTensor writes it: for each axis of the mesh what it does."""
    on = [layout.on(axis) for axis in MESH]
    return [Replicate() if at is None else Partial() if at == "sum" else Shard(at) for at in on]


def layout_of(placed, dims: int) -> Layout:
    """A layout from DTensor's placements."""
    found = Layout.whole(dims)
    for axis, one in zip(MESH, placed, strict=True):
        if one.is_shard():
            found = found.cut(one.dim, (*found.cuts[one.dim], axis))
        elif one.is_partial():
            found = found.summed(axis, "sum")
    return found


def dtensor_results(rank: int, world_size: int, chosen: list[Case]) -> list[tuple[Layout | None, int, int]]:
    """(layout of the result, elements that this rank sent, collectives) of each case, by DTensor on live ranks.

    Where DTensor refuses, which it does before it sends the case's last message, the layout is None.
    """
    mesh = DeviceMesh("cpu", torch.arange(world_size).view(*MESH.values()))
    found = []
    for case in chosen:
        *terms, out = case.terms
        parts = [
            DTensor.from_local(
                torch.ones(local_shape((SIZE,) * len(term), one, MESH, places(MESH)[rank])),
                mesh,
                dtensor_placements(one),
                run_check=False,
            )
            for term, one in zip(terms, case.layouts, strict=True)
        ]
        with CommDebugMode() as counted, Sent() as sent:
            try:
                y = torch.einsum(case.text, *parts)
            except RuntimeError:
                found.append((None, 0, 0))
                continue
        found.append((layout_of(y.placements, len(out)), sent.elements, counted.get_total_counts()))
        assert counted.get_total_counts() == sum(sent.calls.values())
    return found


QUIETLY = partial(launch, echo=False)


def count_kinds(chosen: list[Case], launch=QUIETLY) -> Counter:
    """How many of the cases are of each kind."""
    found = launch(dtensor_results, chosen, ranks=4)
    return Counter(
        kind(case, ranks[0][0], sum(elements for _, elements, _ in ranks))
        for case, ranks in zip(chosen, zip(*found, strict=True), strict=True)
    )


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


def race(rank, world_size, block, program, rows, length, config, steps, over) -> dict:
    """Seconds a step, elements sent and collectives of both, and how far the results are apart, on one rank."""
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
    mesh, order = rivals.rival_mesh(over), qkv_order(config.n_embd, world_size)
    for p in (block.attn.c_attn.weight, block.attn.c_attn.bias):
        p.data = p.data[order].clone()
    plan = {"attn.c_attn": ColwiseParallel(), "attn.c_proj": RowwiseParallel()}
    parallelize_module(block, mesh, plan | {"mlp.c_fc": ColwiseParallel(), "mlp.c_proj": RowwiseParallel()})
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
    seconds = medians(steps, ours, theirs)
    return {
        "seconds": seconds,
        "ours": sent,
        "theirs": (elements.elements, counted.get_total_counts()),
        "apart": apart,
    }


QUICK = "--pairs 10 --width 128 --rows 2 --steps 5"  # with --all --quick


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--pairs", type=int, default=400, help="random einsums with layouts (default 400)")
    parser.add_argument(
        "--width", type=int, default=256, metavar="C", help="features of the block (default 256)"
    )
    parser.add_argument("--rows", type=int, default=4, metavar="B", help="sequences in a step (default 4)")
    parser.add_argument("--length", type=int, default=64, metavar="T", help="tokens of each (default 64)")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each (default 15)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the block (default 2)")
    rivals.add_argument(parser)


def run(args: argparse.Namespace) -> dict[str, float]:
    """Print the table of the pairs, and the block's messages, bytes and seconds."""
    found = count_kinds(cases(args.pairs))
    print(f"{args.pairs} random einsums with random layouts on 2 x 2 ranks, ours beside DTensor's (counted)")
    for name in KINDS:
        print(f"  {found[name]:5}  {name}")
    config = GPT2Config(n_layer=1, n_head=8, n_embd=args.width)
    block, program = block_program(config, args.rows, args.length, args.ranks)
    each = launch(
        race, block, program, args.rows, args.length, config, args.steps, args.over, ranks=args.ranks
    )
    ours, theirs = (max(r["seconds"][i] for r in each) for i in (0, 1))
    print(
        f"a block, C={args.width}, B={args.rows}, T={args.length}, {args.ranks} ranks, forward and backward"
    )
    print(
        f"  elements sent by a rank, collectives: ours {each[0]['ours']}, DTensor {each[0]['theirs']} (counted)"
    )
    print(
        f"  ours {1e3 * ours:.1f} ms, DTensor {1e3 * theirs:.1f} ms, ratio {ours / theirs:.3f}; "
        f"results differ by {max(r['apart'] for r in each):.0e}; {rivals.carriers(args.over)}"
    )
    return {f"ours, {args.ranks} ranks": ours, f"DTensor, {args.ranks} ranks": theirs}
