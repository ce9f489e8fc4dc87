"""GPT-2's own forward, loss, backward and update, captured as one graph of described operators.

`make_fx` runs the Python once on tensors without numbers and writes down what reaches ATen. `torch.export` stops
before the loss; AOT autograd makes two graphs, forward and backward, with a border that layouts would have to cross;
`torch.fx.symbolic_trace` does not see backward at all. Here `torch.autograd.grad` is part of the function, so backward
is operators like all others, and f and g, which Megatron puts there by hand, can follow from them.

What has sums inside (layer norm, softmax) is decomposed into its sums, so that each can be cut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from ..model import GPT2, GPT2Config
from .graph import Builder, Graph
from .operators import rule

aten = torch.ops.aten
CONSTANTS = ("full", "arange", "scalar_tensor")


def layer_norm(x, shape, weight, bias, eps):
    """`native_layer_norm` by its two sums a row: the result, the mean, and one over the deviation."""
    n, dims = x.size(-1), [-1]
    mean = x.sum(dims, keepdim=True) / n
    centred = x - mean
    scale = ((centred * centred).sum(dims, keepdim=True) / n + eps).rsqrt()
    return centred * scale * weight + bias, mean, scale


def softmax(x, dim, half_to_float=False):
    """`_softmax` by its maximum and its sum."""
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum([dim], keepdim=True)


def log_softmax(x, dim, half_to_float=False):
    """`_log_softmax` by its maximum and its sum."""
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - shifted.exp().sum([dim], keepdim=True).log()


def plain_attention(q, k, v, positions, window=None):
    """Causal attention (B, H, T, D) as two products and a softmax, so that heads, queries and keys can be cut."""
    if window is not None:
        raise ValueError("attention with a window is not captured. Use a GPT2Config with window=None.")
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    return scores.masked_fill(positions[:, None] < positions, float("-inf")).softmax(-1) @ v


def decompositions() -> dict:
    """How operators fall into simpler ones: ATen's core set, and what has sums inside by its sums."""
    table = dict(core_aten_decompositions())
    for kept in (aten.embedding_dense_backward.default, aten.gelu_backward.default):
        table.pop(kept, None)
    own = {aten.native_layer_norm: layer_norm, aten._softmax: softmax, aten._log_softmax: log_softmax}
    return table | {op.default: function for op, function in own.items()}


@dataclass(frozen=True)
class AtenCall:
    """What a rank runs for a node: ATen's operator by name and its arguments; `Value` stands where an input goes."""

    target: str
    args: tuple
    kwargs: dict

    def __call__(self, given: Sequence[torch.Tensor], *first) -> torch.Tensor:
        """Run it; `first` replaces the first arguments."""
        name, _, overload = self.target.partition(".")
        args = (*first, *self.arguments(given)[len(first) :])
        return getattr(getattr(aten, name), overload)(*args, **self.kwargs)

    def arguments(self, given: Sequence[torch.Tensor]) -> list:
        """The arguments with the inputs in their places."""
        pick = lambda a: given[a.number] if isinstance(a, Value) else a
        return [[pick(one) for one in a] if isinstance(a, list | tuple) else pick(a) for a in self.args]


@dataclass(frozen=True)
class Value:
    """The place of a node's input among the arguments of its call."""

    number: int


def capture(function: Callable, inputs: dict[str, torch.Tensor], results: Sequence[str], names=None) -> Graph:
    """The graph of `function(*inputs)`, which returns as many tensors as there are names of `results`.

    `names` are those of the dimensions of inputs, as far as they have some.

    Raises ValueError for an operator without a description.
    """
    with torch.enable_grad():
        traced = make_fx(function, decompositions(), tracing_mode="fake")(*inputs.values())
    traced.graph.eliminate_dead_code()
    return _Reader(inputs, results, names or {}).read(traced.graph)


class _Reader:
    """Turns the nodes of an fx graph into those of ours."""

    def __init__(self, inputs, results, dims):
        self.names, self.results, self.dims = list(inputs), list(results), dims
        self.builder, self.fx, self.copies = Builder(), {}, 0

    def read(self, graph) -> Graph:
        names = iter(self.names)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.fx[node] = next(names)
                self._add(node, self.fx[node], "input", (), None, None)
            elif node.op == "call_function":
                self._operator(node)
            elif node.op == "output":
                made = [self._name(n) for n in node.args[0]]
        return self.builder.finish(dict(zip(self.results, made, strict=True)), self.dims)

    def _add(self, node, name, op, inputs, how, call):
        value = node.meta["val"]
        self.builder.add(name, op, inputs, tuple(value.shape), how, value.element_size(), call)

    def _name(self, node) -> str:
        """The value that an fx node became. A constant is made anew for each reader, cut as that one needs it."""
        if self.fx[node] is not None:
            return self.fx[node]
        self.copies += 1
        value, op = node.meta["val"], node.target.__name__.split(".")[0]
        name = f"{node.name}.{self.copies}"
        op = "full" if op == "full_like" else op
        call = AtenCall(node.target.__name__, node.args, {"dtype": value.dtype})
        if op == "full":
            call = AtenCall("full.default", (list(value.shape), node.args[1]), {"dtype": value.dtype})
        self._add(node, name, op, (), rule(op, (), tuple(value.shape)), call)
        return name

    def _operator(self, node) -> None:
        op = getattr(node.target, "__name__", "").split(".")[0]
        if op in (*CONSTANTS, "full_like"):
            self.fx[node] = None
            return
        if op == "split_with_sizes":
            return  # its pieces are read one by one
        self.fx[node] = node.name
        if op == "getitem":
            self._piece(node)
            return
        inputs = [self._name(n) for n in _nodes(node.args)]
        order = iter(range(len(inputs)))
        args = torch.fx.map_arg(node.args, lambda n: Value(next(order)))
        self._add(
            node,
            node.name,
            op,
            inputs,
            self._how(op, node),
            AtenCall(node.target.__name__, args, dict(node.kwargs)),
        )

    def _how(self, op, node):
        value, args = node.meta["val"], node.args
        if op in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"):
            return "view"
        if op == "cat":
            if len({n.meta["val"].shape for n in args[0]}) > 1:
                raise ValueError("pieces of different lengths cannot be joined in a partitioned program.")
            return ("join", (args[1] if len(args) > 1 else 0) % value.dim())
        shape = lambda a: tuple(a.meta["val"].shape) if isinstance(a, torch.fx.Node) else None
        shapes, dims, keep = tuple(shape(a) for a in args), (), False
        if op in ("sum", "amax"):
            rank = len(shapes[0])
            dims = tuple(d % rank for d in (args[1] if len(args) > 1 and args[1] else range(rank)))
            keep = len(args) > 2 and args[2]
        elif op == "permute":
            dims = tuple(d % value.dim() for d in args[1])
        elif op in ("gather", "scatter"):
            dims = (args[1],)
        if op in (
            "expand",
            "clamp",
            "_to_copy",
            "gelu",
            "gelu_backward",
            "embedding",
            "embedding_dense_backward",
        ):
            shapes = tuple(s for s in shapes if s is not None)
        return rule(op, shapes, tuple(value.shape), dims, keep)

    def _piece(self, node) -> None:
        split, number = node.args
        x, sizes, dim = (*split.args, 0)[:3]
        if len(set(sizes)) > 1:
            raise ValueError(f"pieces of {sizes} are not equal, so a partitioned program cannot make them.")
        rank = x.meta["val"].dim()
        call = AtenCall("piece", (Value(0), len(sizes), dim % rank, number), {})
        self._add(node, node.name, "piece", [self._name(x)], ("piece", dim % rank), call)


def captured_module(module: torch.nn.Module, x: torch.Tensor, names: dict, others=tuple) -> Graph:
    """A module's forward and backward as a graph: `y` and, for x and each parameter, `grad NAME`, from `grad y`.

    `names` are those of the dimensions of x and of the parameters; `others()` makes further, constant arguments.
    """
    params = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    given = {"x": x.detach().clone().requires_grad_(), **params}

    def step(*values):
        own = dict(zip(params, values[1:-1], strict=True))
        y = torch.func.functional_call(module, own, (values[0], *others()))
        return y, *torch.autograd.grad(y, values[:-1], values[-1])

    inputs = given | {"grad y": torch.zeros_like(x)}
    return capture(step, inputs, ["y", *(f"grad {n}" for n in given)], names | {"grad y": names["x"]})


def captured_gpt2(
    config: GPT2Config, rows: int, length: int, update: str | None = None, dtype=torch.float64
) -> Graph:
    """One step of GPT-2 on (rows, length) tokens as a graph: `loss` and, for each parameter, `grad NAME`.

    With `update="adamw"`, the first step of AdamW, the graph also takes the moments `m NAME` and `v NAME`, and gives
    `new NAME`, `new m NAME` and `new v NAME` instead of the gradients. Raises ValueError for another update.
    """
    if update not in (None, "adamw"):
        raise ValueError(f"update {update!r} cannot be captured. Use None for the gradients, or 'adamw'.")
    model = GPT2(config).to(dtype)
    for block in model.h.values():
        block.attn.core = plain_attention
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    tokens = torch.zeros(rows, length, dtype=torch.long)
    inputs = {**params, "tokens": tokens, "targets": tokens.clone()}
    names, moments = list(params), {}
    if update == "adamw":
        moments = {f"{kind} {n}": torch.zeros_like(p) for kind in "mv" for n, p in params.items()}

    def step(*values):
        given = dict(zip(names, values, strict=False))
        tokens, targets = values[len(names) : len(names) + 2]
        loss = model.loss(torch.func.functional_call(model, given, (tokens,)), targets)
        grads = torch.autograd.grad(loss, list(given.values()))
        if update is None:
            return loss, *grads
        state = iter(values[len(names) + 2 :])
        return loss, *_adamw(list(given.values()), grads, list(state))

    results = [f"new {n}" for n in (*names, *moments)] if update else [f"grad {n}" for n in names]
    dims = {name: dimensions(name) for name in (*inputs, *moments)}
    return capture(step, inputs | moments, ["loss", *results], dims)


DIMENSIONS = {
    "tokens": "batch seq",
    "targets": "batch seq",
    "wte.weight": "vocab embd",
    "wpe.weight": "positions embd",
    "c_attn.weight": "qkv heads width embd",
    "c_attn.bias": "qkv heads width",
    "attn.c_proj.weight": "embd heads width",
    "c_fc.weight": "ff embd",
    "c_fc.bias": "ff",
    "mlp.c_proj.weight": "embd ff",
}


def dimensions(name: str) -> tuple[str, ...]:
    """The names of the dimensions of GPT-2's inputs; q, k, v and the heads, fused in the weight, are apart."""
    return next((tuple(d.split()) for end, d in DIMENSIONS.items() if name.endswith(end)), ("embd",))


RATE, BETAS, EPS = 1e-2, (0.9, 0.95), 1e-8


def _adamw(weights, grads, moments):
    """The first step of AdamW without decay; new weights, then both moments."""
    half = len(weights)
    m = [BETAS[0] * m + (1 - BETAS[0]) * g for m, g in zip(moments[:half], grads, strict=True)]
    v = [BETAS[1] * v + (1 - BETAS[1]) * (g * g) for v, g in zip(moments[half:], grads, strict=True)]
    new = [
        w.detach() - RATE * (a / (1 - BETAS[0])) / ((b / (1 - BETAS[1])).sqrt() + EPS)
        for w, a, b in zip(weights, m, v, strict=True)
    ]
    return [*new, *m, *v]


def _nodes(args) -> list:
    found = []
    torch.fx.map_arg(args, lambda n: found.append(n) or n)
    return found
