"""GPT-2 partitioned by marks and run on live ranks, beside the serial run and the package's own strategies."""

import math
import operator
from functools import cache, reduce

import torch
import torch.nn.functional as F

from gpt2lab.model import GPT2, GPT2Config
from gpt2lab.ranks import comm
from gpt2lab.reference import example_batch, example_weights
from gpt2lab.sharding import layout, products, reshard
from gpt2lab.sharding.capture import capture
from gpt2lab.sharding.describe import Rule, analyse
from gpt2lab.sharding.expression import Expr, Index
from gpt2lab.sharding.gpt2 import captured_gpt2
from gpt2lab.sharding.interpret import Interpreter
from gpt2lab.sharding.partition import partition
from gpt2lab.sharding.propagate import owner, propagate

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=2, n_head=4, n_embd=24)
ROWS, LENGTH = 7, 11


def layouts(dims: int, axes, partial=("sum",)) -> list[layout.Layout]:
    """Every layout of a tensor of `dims` dimensions: each axis cuts a dimension, sums, or does nothing."""
    found = [layout.Layout.whole(dims)]
    for axis in axes:
        more = []
        for one in found:
            more += [one, *(one.summed(axis, op) for op in partial)]
            for dim, cut in enumerate(one.cuts):
                more += [one.cut(dim, (*cut[:i], axis, *cut[i:])) for i in range(len(cut) + 1)]
        found = more
    return found


def einsum(text: str) -> Rule:
    """The rule of an einsum of any number of tensors, such as "ik,kj->ij"."""
    inputs, _, output = text.partition("->")
    terms, summed = inputs.split(","), sorted(set(inputs) - set(output) - {","})

    def describe(*tensors):
        def element(*i):
            index = dict(zip(output, i, strict=True)) | {name: Index(name) for name in summed}
            read = [t[tuple(index[l] for l in term)] for t, term in zip(tensors, terms, strict=True)]
            body = reduce(operator.mul, read)
            return Expr("reduce", ("sum", tuple(index[name] for name in summed), body)) if summed else body

        return element

    return analyse(describe, len(terms), len(output))


@cache
def graph(recipe=None, config=CONFIG):
    """The captured gradients, or with a recipe the captured step."""
    return captured_gpt2(config, ROWS, LENGTH, recipe)


@cache
def inputs(config=CONFIG) -> dict:
    """Weights far from initialisation, and a batch in which rows have unequally many targets."""
    batch = example_batch(config, ROWS, LENGTH)
    return {**example_weights(config), "tokens": batch.tokens, "targets": batch.targets}


@cache
def serial(config=CONFIG) -> dict:
    """The summed loss and every gradient of plain PyTorch."""
    model = GPT2(config).double()
    values = inputs(config)
    model.load_state_dict({n: values[n] for n, _ in model.named_parameters()})
    loss = model.loss(model(values["tokens"]), values["targets"])
    loss.backward()
    return {"loss": loss.detach()} | {f"grad {n}": p.grad for n, p in model.named_parameters()}


def program(marks, mesh, of=None):
    """The program that marks make of a graph (of GPT-2's gradients, unless another is given)."""
    of = of or graph()
    return partition(of, propagate(of, marks, mesh), mesh)


def check_program(pools, one, given=None, want=None):
    """Run it; every rank is equal to the serial run, and sends what the program says. Returns what each sent."""
    found = pools[layout.ranks(one.mesh)].run(run_program, one, given or inputs(), want or serial())
    for place, (error, size, messages, _) in zip(layout.places(one.mesh), found, strict=True):
        assert error <= 1e-10
        assert (size, messages) == one.cost(place)
    return found


def run_program(rank, world_size, program, given, want):
    """(largest relative error of all results, bytes sent, messages sent, calls by operation) of one rank."""
    axes = reshard.live_axes(program.mesh)
    interpreter = Interpreter(program, axes)
    comm.clear_log()
    found = interpreter.run(given)
    sent = sum(e.bytes for e in comm.log), sum(e.messages for e in comm.log)
    calls = {op: (calls, size) for (op, _), (calls, size, _) in comm.traffic().items()}
    return furthest(program, axes, found, want), *sent, calls


def furthest(program, axes, found, want) -> float:
    """The largest relative error of this rank's parts of all results; infinite where it is not a number."""
    worst = 0.0
    for result, part in found.items():
        node = program.graph.nodes[program.graph.outputs[result]]
        right = reshard.shard(want[result].reshape(node.shape), program.results[result], axes)
        error = (part - right.reshape(part.shape)).abs().max() / want[result].abs().max()
        worst = max(worst, error.nan_to_num(math.inf).item())
    return worst


def train_program(rank, world_size, program, given, first, last, steps=5):
    """(error of the first step's results, error of the weights after all steps, what each step sent)."""
    axes = reshard.live_axes(program.mesh)
    interpreter = Interpreter(program, axes)
    parts = {name: interpreter.part(name, value) for name, value in given.items()}
    sent = []
    for step in range(1, steps + 1):
        parts["step"] = torch.tensor(float(step), dtype=torch.float64)
        comm.clear_log()
        found = interpreter.run(parts, parts=True)
        sent.append((sum(e.bytes for e in comm.log), sum(e.messages for e in comm.log)))
        if step == 1:
            once = furthest(program, axes, {n: found[n] for n in first}, first)
        parts |= {owner(n): part for n, part in found.items() if n.startswith("new ")}
    return once, furthest(program, axes, {n: found[n] for n in last}, last), sent


def handwritten(rank, world_size, plan):
    """What the package's own strategy sends for the same gradients: {(operation, axis): (calls, bytes)}."""
    from gpt2lab.plan import build
    from gpt2lab.ranks.mesh import Mesh
    from gpt2lab.verify import Plan

    plan = Plan.parse(plan)
    parallel = build(plan, CONFIG, Mesh(pp=plan.pp, dp=plan.dp, cp=plan.cp, tp=plan.tp), torch.float64)
    parallel.load(example_weights(CONFIG))
    batch = example_batch(CONFIG, ROWS, LENGTH)
    comm.clear_log()
    with torch.enable_grad():
        parallel.engine.run(parallel.mine(batch), None, parallel.sync)
    parallel.sync.finish()
    return {key: (calls, size) for key, (calls, size, _) in comm.traffic().items()}


NAMES = {
    "x": ("n", "c", "h", "w"),
    "grad y": ("n", "o", "i", "j"),
    "weight": ("o", "c", "a", "b"),
    "bias": ("o",),
}


def convolution(x, weight, bias, grad):
    y = F.conv2d(x, weight, bias)
    return y, *torch.autograd.grad(y, (x, weight, bias), grad)


def image(height, kernel):
    """The graph of a convolution, forward and backward, its inputs, and what PyTorch gives."""
    generator = torch.Generator().manual_seed(height)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    a, b = kernel
    x, weight, bias = draw(2, 4, height, 9), draw(6, 4, a, b), draw(6)
    given = {"x": x, "weight": weight, "bias": bias, "grad y": draw(2, 6, height - a + 1, 9 - b + 1)}
    for value in (x, weight, bias):
        value.requires_grad_()
    results = ["y", "grad x", "grad weight", "grad bias"]
    whole = capture(convolution, given, results, NAMES)
    want = dict(zip(results, convolution(*given.values()), strict=True))
    return whole, {n: v.detach() for n, v in given.items()}, {n: v.detach() for n, v in want.items()}


def matrices(m, n, k):
    generator = torch.Generator().manual_seed(m)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    return {"A": draw(m, k), "B": draw(k, n), "grad": draw(m, n)}


def one_product(rank, world_size, mesh, given):
    """(errors of C and both gradients, elements sent forward, backward) of one rank."""
    axes = reshard.live_axes(mesh)
    part = lambda name, of=None: reshard.shard(
        of if of is not None else given[name], products.LAYOUTS[name], axes
    )
    a, b = part("A").requires_grad_(), part("B").requires_grad_()
    comm.clear_log()
    c = products.multiply(a, b, given["A"].size(1), axes)
    forward = sum(e.bytes for e in comm.log) // 8
    comm.clear_log()
    c.backward(part("C", given["grad"]))
    right = {
        "A": given["grad"] @ given["B"].T,
        "B": given["A"].T @ given["grad"],
        "C": given["A"] @ given["B"],
    }
    found = {"A": a.grad, "B": b.grad, "C": c.detach()}
    off = torch.cat([(found[n] - part(n, right[n])).abs().flatten() for n in "ABC"])
    return off.max().nan_to_num(math.inf).item(), forward, sum(e.bytes for e in comm.log) // 8
