"""What lesson 14 runs beside its own code: operators with messages inside, products on grids, cut against placed."""

import time

import torch
import torch.nn.functional as F

from ...model import MLP as GPT2MLP
from ...plots import sharding as plots
from ...processes.launch import launch
from ...ranks import comm
from ...ranks.mesh import Mesh
from ...reference import example_batch, example_weights, serial_gradients, serial_model
from ...sharding import named, products, reshard
from ...sharding.capture import capture
from ...sharding.describe import analyse
from ...sharding.gpt2 import captured_module, plain_attention
from ...sharding.operators import LIBRARY
from ...sharding.partition import partition
from ...sharding.propagate import propagate
from .instruments import bytes_sent

MLP = {
    "x": ("batch", "seq", "embd"),
    "grad y": ("batch", "seq", "embd"),
    "c_fc.weight": ("ff", "embd"),
    "c_fc.bias": ("ff",),
    "c_proj.weight": ("embd", "ff"),
    "c_proj.bias": ("embd",),
    "hidden": ("batch", "seq", "ff"),
}

BLOCK = {
    **{name: MLP[name] for name in ("x", "grad y", "hidden")},
    **{f"mlp.{name}": dims for name, dims in MLP.items() if name.startswith("c_")},
    **{f"{norm}.{kind}": ("embd",) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")},
    "attn.c_attn.weight": ("qkv", "heads", "width", "embd"),
    "attn.c_attn.bias": ("qkv", "heads", "width"),
    "attn.c_proj.weight": ("embd", "heads", "width"),
    "attn.c_proj.bias": ("embd",),
    "queries": ("batch", "heads", "seq", "width"),
    "scores": ("batch", "heads", "seq", "keys"),
}


SECONDS = 0.04
"""A product's pretended time on one rank."""


def cuts_of_operators() -> list[tuple[str, str, str]]:
    """For every operator of the library: its name, its free cuts (* leaves a partial sum), its cuts with messages."""
    rows = []
    for name, description in LIBRARY.items():
        options = analyse(description).options
        cuts = [o for o in options if o.index not in ("", "partial")]
        free = " ".join(f"{o.index}{'*' if o.output == 'sum' else ''}" for o in cuts if o.free)
        inner = [
            f"{o.index}: " + ", ".join(f"{op}[{' '.join(i)}]" for op, i in o.messages)
            for o in cuts
            if o.messages
        ]
        rows.append((name, free, "; ".join(inner + [f"{o.index}: halo" for o in cuts if o.halos])))
    return rows


def mlp_programs(config, mesh: dict[str, int]) -> tuple:
    """GPT-2's MLP as a graph, its inputs, serial results, and a (layout, program) for each legal layout on the mesh."""
    mlp = GPT2MLP(config).double()
    x = torch.randn(3, 5, config.n_embd, dtype=torch.float64, requires_grad=True)
    names = dict(mlp.named_parameters())
    graph = captured_module(mlp, x, {n: MLP[n] for n in ("x", *names)})
    given = {"x": x.detach(), "grad y": torch.ones_like(x)} | {n: p.detach() for n, p in names.items()}
    y = mlp(x)
    y.backward(given["grad y"])
    want = {"y": y.detach(), "grad x": x.grad} | {f"grad {n}": p.grad for n, p in names.items()}
    programs = []
    for layout in named.legal_layouts(MLP, mesh):
        spread = propagate(graph, named.marks(graph, layout, MLP), mesh)
        programs.append((layout, partition(graph, spread, mesh)))
    return graph, given, want, programs


def tiles(x: str, y: str):
    """The MLP's tensors on 2 x 2 ranks, with one dimension cut over x and one (or none) over y."""
    tensors = {name: MLP[name] for name in ("x", "c_fc.weight", "hidden", "c_proj.weight")}
    layout = {name: axis for name, axis in ((x, "x"), (y, "y")) if name != "none"}
    words = named.complaint(tensors, layout) or ", ".join(f"{name}:{axis}" for name, axis in layout.items())
    return plots.who_holds(tensors, layout, {"x": 2, "y": 2}, words)


def messages(program) -> list[tuple[int, str, int]]:
    """(place among the operators, kind, elements of the whole tensor) of every message of a program."""
    nodes = program.graph.nodes
    order = {name: i for i, name in enumerate(nodes)}
    return [(order[value], kind, nodes[value].size) for kind, _, value in program.changes()]


def operators() -> dict[str, tuple]:
    """{name: (graph, marks, inputs, results)} of operators under a cut each, forward and the gradient of one input."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    step = lambda y, x: (y, *torch.autograd.grad(y.square().sum(), x))
    image = {"x": draw(2, 3, 9, 9).requires_grad_(), "filters": draw(4, 3, 3, 3)}
    qkv = {name: draw(2, 2, 8, 4).requires_grad_() for name in "qkv"}
    rows = {"x": draw(5, 8).requires_grad_(), "weight": draw(8), "bias": draw(8)}
    normalise = lambda x, weight, bias: step(F.layer_norm(x, (8,), weight, bias), x)
    convolve = lambda x, w: step(F.conv2d(x, w), x)
    attend = lambda q, k, v: step(plain_attention(q, k, v, torch.arange(8)), k)
    cases = {
        "convolution, filters cut": (convolve, image, {"filters": "S0RRR"}, "grad x"),
        "convolution, channels cut": (convolve, image, {"x": "RS0RR"}, "grad x"),
        "convolution, height cut": (convolve, image, {"x": "RRS0R"}, "grad x"),
        "layer norm, width cut": (normalise, rows, {"x": "RS0"}, "grad x"),
        "attention, keys cut": (attend, qkv, {"k": "RRS0R", "v": "RRS0R"}, "grad k"),
    }
    found = {}
    for name, (function, given, marks, gradient) in cases.items():
        graph = capture(function, given, ["y", gradient])
        right = zip(("y", gradient), function(*given.values()), strict=True)
        found[name] = graph, marks, *({n: v.detach() for n, v in of} for of in (given.items(), right))
    return found


def adamw_step(config, rows: int, length: int, recipe) -> tuple[dict, dict]:
    """Inputs and results of a captured step from empty moments: loss, norm, weights, moments by plain PyTorch."""
    batch, weights = example_batch(config, rows, length), example_weights(config)
    model = serial_model(config, weights)
    loss, _, norm = serial_gradients(model, batch)
    named = dict(model.named_parameters())
    torch.nn.utils.clip_grad_norm_(named.values(), recipe.clip)
    groups = [
        {"params": [p for p in named.values() if (p.dim() >= 2) == bool(decay)], "weight_decay": decay}
        for decay in (recipe.weight_decay, 0.0)
    ]
    adamw = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
    adamw.step()
    scalars = {"total": torch.tensor(float(batch.total)).double(), "step": torch.ones(()).double()}
    given = {**weights, "tokens": batch.tokens, "targets": batch.targets, **scalars}
    want = {"loss": loss, "norm": norm} | {f"new {n}": p.detach() for n, p in named.items()}
    for kind, moment in (("m", "exp_avg"), ("v", "exp_avg_sq")):
        given |= {f"{kind} {n}": torch.zeros_like(p) for n, p in weights.items()}
        want |= {f"new {kind} {n}": adamw.state[p][moment] for n, p in named.items()}
    return given, want


def products_on_grids(n: int = 24) -> list[tuple]:
    """Of each grid: ranks, algorithm, sizes, whether equal, n² sent by a rank one way (counted), and least (bound)."""
    a, b = torch.randn(2, n, n, dtype=torch.float64)
    rows = []
    for ranks, grids in products.GRIDS.items():
        found = zip(*launch(on_grids, list(grids.values()), a, b, ranks=ranks), strict=True)
        least = products.least(n, n, n, ranks) / n**2
        for (name, grid), each in zip(grids.items(), found, strict=True):
            sent = sum(elements for _, elements in each) / 2 / ranks / n**2
            sizes, equal = " x ".join(map(str, grid)), all(one for one, _ in each)
            rows.append((ranks, name, sizes, equal, f"{sent:.3f}", f"{least:.3f}"))
    return rows


def on_grids(rank, world_size, grids, a, b):
    """For each grid: is C = A B equal to serial, and the gradient of A; and elements sent, forward and backward."""
    return [_on_grid(dict(zip("xyz", grid, strict=True)), a, b) for grid in grids]


def _on_grid(mesh, a, b):
    axes = reshard.live_axes(mesh)
    part = lambda name, whole: reshard.shard(whole, products.LAYOUTS[name], axes)
    mine, other = part("A", a).requires_grad_(), part("B", b).requires_grad_()
    comm.clear_log()
    c = products.multiply(mine, other, a.size(1), axes)
    c.backward(torch.ones_like(c))
    of_a = part("A", b.sum(1).expand(a.shape))
    equal = torch.allclose(c, part("C", a @ b)) and torch.allclose(mine.grad, of_a)
    return equal, bytes_sent() // a.element_size()


def both_cut(rank, world_size, x, w1, w2):
    """Z = X W1 W2 with both products cut: columns, then rows, and an all-reduce."""
    axis = Mesh(tp=world_size)["tp"]
    part = x @ w1.tensor_split(2, 1)[rank]
    time.sleep(SECONDS)  # two halves of a product
    return comm.all_reduce(part @ w2.tensor_split(2, 0)[rank], axis)


def one_each(rank, world_size, x, w1, w2):
    """The same with one product on each rank: Y = X W1 is sent."""
    axis = Mesh(pp=world_size)["pp"]
    if rank == 0:
        time.sleep(SECONDS)
        comm.send(x @ w1, axis, 1)
        return None
    y = comm.recv(x.new_empty(len(x), w1.size(1)), axis, 0)
    time.sleep(SECONDS)
    return y @ w2


def timed_products(rank, world_size, way, *matrices):
    """(result, bytes sent, share of the time without work) of one rank."""
    comm.barrier(Mesh(dp=world_size)["dp"])
    comm.clear_log()
    start = time.perf_counter()
    z = way(rank, world_size, *matrices)
    sent = bytes_sent()
    comm.barrier(Mesh(dp=world_size)["dp"])
    return z, sent, 1 - SECONDS / (time.perf_counter() - start)
