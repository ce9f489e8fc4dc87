"""GPT-2's own forward, loss, backward and update, captured as one graph of described operators.

`make_fx` runs the Python once on tensors without numbers and writes down what reaches ATen. `torch.export` stops
before the loss; AOT autograd makes two graphs, forward and backward, with a border that layouts would have to cross;
`torch.fx.symbolic_trace` does not see backward at all. Here `torch.autograd.grad` is part of the function, so backward
is operators like all others, and f and g, which Megatron puts there by hand, can follow from them.

What has sums inside (layer norm, softmax) is decomposed into its sums, so that each can be cut.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from ..machine.arguments import checked
from .graph import Builder, Graph
from .operators import LINEAR, POINTWISE, RESHAPES, rule

aten = torch.ops.aten
CONSTANTS = ("full", "arange", "scalar_tensor")
STEP_1 = "windows one step apart"
ONLY = {  # operators that have one description for several forms: the one that it knows, and which calls have it
    "view": ("a shape", lambda x, shape: not isinstance(shape, torch.dtype)),
    "unfold": (STEP_1, lambda x, dim, size, step: step == 1),
    "unfold_backward": (STEP_1, lambda grad, sizes, dim, size, step: step == 1),
    "scatter": (
        "a number at one place of each row",
        lambda x, dim, at, number, reduce=None: (
            not reduce and not isinstance(number, torch.fx.Node) and _one_a_row(*_values(x, at), dim)
        ),
    ),
    "addmm": ("a bias of one dimension", lambda b, *more, **scales: b.meta["val"].dim() == 1),
    "embedding_dense_backward": (
        "neither padding_idx nor scale_grad_by_freq",
        lambda grad, at, rows, padding, scaled: padding < 0 and not scaled,
    ),
}


def _one_a_row(x, at, dim: int) -> bool:
    """Whether `at` has one place along a dimension of x for all places along the others."""
    return at.shape == x.narrow(dim, 0, 1).shape


def _values(*nodes) -> list[torch.Tensor]:
    return [node.meta["val"] for node in nodes]


def layer_norm(x, shape, weight, bias, eps):
    """`native_layer_norm` by its two sums a row: the result, the mean, and one over the deviation."""
    n, dims = math.prod(shape), [*range(-len(shape), 0)]
    mean = x.sum(dims, keepdim=True) / n
    centred = x - mean
    scale = ((centred * centred).sum(dims, keepdim=True) / n + eps).rsqrt()
    y = centred * scale
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, scale


def convolution(x, w, bias, stride, padding, dilation, transposed, output_padding, groups):
    """`convolution` of images (N, C, H, W) with w (O, C, a, b) as a product of windows."""
    if transposed or (set(stride) | set(dilation) | {groups}, set(padding)) != ({1}, {0}):
        raise ValueError(
            f"a convolution with stride {stride}, padding {padding}, dilation {dilation} and {groups} groups is not "
            "captured. Use stride 1, dilation 1 and one group, and pad the image before."
        )
    (n, _, h, v), (o, _, a, b) = x.shape, w.shape
    y = _windows(x, a, b) @ w.reshape(o, -1).T
    y = y.reshape(n, h - a + 1, v - b + 1, o).permute(0, 3, 1, 2)
    return y if bias is None else y + bias[:, None, None]


def _windows(x, a, b):
    """The windows of images as rows: (N H' W', C a b)."""
    rows = x.unfold(2, a, 1).unfold(3, b, 1).permute(0, 2, 3, 1, 4, 5)
    return rows.reshape(-1, x.size(1) * a * b)


def convolution_backward(grad, x, w, *options):
    """The gradients of image, filters and bias."""
    (n, c, h, v), (o, _, a, b) = x.shape, w.shape
    rows = grad.permute(0, 2, 3, 1).reshape(-1, o)
    told = (rows @ w.reshape(o, -1)).reshape(n, h - a + 1, v - b + 1, c, a, b).permute(0, 3, 1, 2, 4, 5)
    told = aten.unfold_backward(told, [n, c, h - a + 1, v, a], 3, b, 1)
    of_x = aten.unfold_backward(told, list(x.shape), 2, a, 1)
    return of_x, (rows.T @ _windows(x, a, b)).reshape(w.shape), grad.sum((0, 2, 3))


def _decompositions() -> dict:
    """How operators fall into simpler ones: ATen's core set, and what has sums inside by its sums."""
    table = dict(core_aten_decompositions()) | get_decompositions([aten._softmax, aten._log_softmax])
    for kept in (aten.embedding_dense_backward, aten.gelu_backward, aten.unfold_backward, aten.unfold):
        table.pop(kept.default, None)
    own = {aten.native_layer_norm: layer_norm, aten.convolution: convolution}
    own |= {aten.convolution_backward: convolution_backward}
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


@checked()
def capture(
    function: Callable, inputs: dict[str, torch.Tensor], results: Sequence[str], names: dict | None = None
) -> Graph:
    """The graph of `function(*inputs)`, which returns as many tensors as there are names of `results`.

    `names` are those of the dimensions of inputs, as far as they have some.

    Raises ValueError for an operator without a description.
    """
    with torch.enable_grad():
        traced = make_fx(function, _decompositions(), tracing_mode="fake")(*inputs.values())
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
            elif node.op == "get_attr":
                raise ValueError(
                    "The function reads a tensor that is none of its inputs. Make it one of them."
                )
            elif node.op == "output":
                given = node.args[0]
                made = [self._name(n) for n in (given if isinstance(given, list | tuple) else [given])]
        if len(made) != len(self.results):
            raise ValueError(
                f"The function returns {len(made)} tensors, not {len(self.results)}. Name each of them in `results`."
            )
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
        inputs: list[str] = []

        def placed(n) -> Value:
            inputs.append(self._name(n))
            return Value(len(inputs) - 1)

        args = torch.fx.map_arg(node.args, placed)
        call = AtenCall(node.target.__name__, args, dict(node.kwargs))
        self._add(node, node.name, op, inputs, self._how(op, node), call)

    def _how(self, op, node):
        value, args = node.meta["val"], node.args
        if op in ONLY and not ONLY[op][1](*args, **node.kwargs):
            raise ValueError(
                f"{op} is captured only with {ONLY[op][0]}. Use it so, or write it in another way."
            )
        if op in RESHAPES:
            return "view"
        if op == "cat":
            if len({n.meta["val"].shape for n in args[0]}) > 1:
                raise ValueError("pieces of different lengths cannot be joined in a partitioned program.")
            return ("join", (args[1] if len(args) > 1 else 0) % value.dim())
        if op in LINEAR and (node.kwargs.get("rounding_mode") or not value.dtype.is_floating_point):
            op = "round"
        numbers = (int, float) if op in POINTWISE else ()
        given = [a for a in args if isinstance(a, (torch.fx.Node, *numbers))]
        shapes = tuple(tuple(a.meta["val"].shape) if isinstance(a, torch.fx.Node) else None for a in given)
        dims, keep = (), False
        if op in ("sum", "amax"):
            rank = len(shapes[0])
            dims = tuple(d % rank for d in (args[1] if len(args) > 1 and args[1] else range(rank)))
            keep = len(args) > 2 and args[2]
        elif op == "permute":
            dims = tuple(d % value.dim() for d in args[1])
        elif op in ("gather", "scatter", "unfold", "unfold_backward"):
            rank = value.dim() - (op == "unfold")
            dims = (args[2 if op == "unfold_backward" else 1] % rank,)
        return rule(op, shapes, tuple(value.shape), dims, keep)

    def _piece(self, node) -> None:
        split, number = node.args
        x, sizes, dim = (*split.args, 0)[:3]
        if len(set(sizes)) > 1:
            raise ValueError(f"pieces of {sizes} are not equal, so a partitioned program cannot make them.")
        rank = x.meta["val"].dim()
        call = AtenCall("piece", (Value(0), len(sizes), dim % rank, number), {})
        self._add(node, node.name, "piece", [self._name(x)], ("piece", dim % rank), call)
