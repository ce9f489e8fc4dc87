"""Descriptions of operators as lambdas over indices; `gpt2lab.sharding.describe` reads off them how they can be cut.

`LIBRARY` has the well-known ones as one expression each. `rule` describes an operator of a captured program, by its
name in ATen, from the shapes of its operands.
"""

import functools
import re
from functools import lru_cache

from ..machine.arguments import checked
from .describe import Rule, analyse
from .expression import Expr, Index, Max, Sum, apply, same, where


def softmax(x):
    """y[i, j] = exp(x[i, j] - max) / sum of exp."""
    return lambda i, j: (
        apply(x[i, j], Max(lambda k: x[i, k])) / Sum(lambda m: apply(x[i, m], Max(lambda n: x[i, n])))
    )


def layer_norm(x, weight, bias):
    """(x - mean) / deviation, times a weight, plus a bias, for each row."""
    mean = lambda i: Sum(lambda k: x[i, k])
    spread = lambda i: Sum(lambda m: apply(x[i, m], mean(i)))
    return lambda i, j: apply(x[i, j], mean(i), spread(i)) * weight[j] + bias[j]


def attention(q, k, v):
    """Causal attention of one head: scores, softmax over the keys s, values."""
    score = lambda b, h, t, s: apply(Sum(lambda d: q[b, h, t, d] * k[b, h, s, d]), t, s)
    top = lambda b, h, t: Max(lambda s: score(b, h, t, s))
    total = lambda b, h, t: Sum(lambda s: apply(score(b, h, t, s), top(b, h, t)))
    weight = lambda b, h, t, s: apply(score(b, h, t, s), top(b, h, t))
    return lambda b, h, t, e: Sum(lambda s: weight(b, h, t, s) * v[b, h, s, e]) / total(b, h, t)


def cross_entropy(logits, targets):
    """The sum over rows of log(sum of exp) minus the target's logit."""
    top = lambda i: Max(lambda v: logits[i, v])
    total = lambda i: Sum(lambda v: apply(logits[i, v], top(i)))
    return lambda: Sum(lambda i: apply(total(i)) + top(i) - logits[i, targets[i]])


LIBRARY = {
    "matmul": lambda A, B: lambda i, j: Sum(lambda k: A[i, k] * B[k, j]),
    "add": lambda a, b: lambda i, j: a[i, j] + b[i, j],
    "gelu": lambda x: lambda i, j: apply(x[i, j]),
    "sum of rows": lambda x: lambda j: Sum(lambda i: x[i, j]),
    "softmax": softmax,
    "layer norm": layer_norm,
    "embedding": lambda w, t: lambda b, s, c: w[t[b, s], c],
    "attention": attention,
    "cross entropy": cross_entropy,
    "convolution": lambda x, w: lambda n, o, h, v: Sum(lambda c, a, b: x[n, c, h + a, v + b] * w[o, c, a, b]),
}


@checked()
def einsum(text: str) -> Rule:
    """The rule of an einsum of any number of tensors, such as "ik,kj->ij". Raises ValueError for any other text."""
    inputs, _, output = text.partition("->")
    known = re.fullmatch(r"[a-zA-Z]*(,[a-zA-Z]*)*->[a-zA-Z]*", text) and set(output) <= set(inputs)
    if not known or not inputs or len(set(output)) < len(output):
        raise ValueError(f"{text!r} is no einsum. Write one as in ik,kj->ij, each index behind -> once.")
    terms, summed = inputs.split(","), sorted(set(inputs) - set(output) - {","})

    def describe(*tensors):
        def element(*i):
            index = dict(zip(output, i, strict=True)) | {name: Index(name) for name in summed}
            first, *others = (
                t[tuple(index[l] for l in term)] for t, term in zip(tensors, terms, strict=True)
            )
            body = functools.reduce(lambda a, b: a * b, others, first)
            return Expr("reduce", ("sum", tuple(index[name] for name in summed), body)) if summed else body

        return element

    return analyse(describe, len(terms), len(output))


LINEAR = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "where": where,
    "gelu_backward": lambda grad, x: grad * apply(x),
    **dict.fromkeys(("clone", "alias", "_to_copy", "expand", "detach"), lambda a: a),
}
"""Element by element, and linear in something; of the other names in POINTWISE nothing is known."""

POINTWISE = {
    *LINEAR,
    *(
        "gelu",
        "tanh",
        "exp",
        "log",
        "rsqrt",
        "sqrt",
        "pow",
        "reciprocal",
        "rsub",
        "ge",
        "lt",
        "ne",
        "eq",
        "clamp",
    ),
    *("bitwise_and", "bitwise_not", "logical_not", "maximum", "minimum"),
}

PRODUCTS = {
    "mm": LIBRARY["matmul"],
    "addmm": lambda b, A, B: lambda i, j: b[j] + Sum(lambda k: A[i, k] * B[k, j]),
    "bmm": lambda A, B: lambda n, i, j: Sum(lambda k: A[n, i, k] * B[n, k, j]),
}


def pointwise(name: str, shapes: tuple, out: tuple[int, ...]) -> Rule:
    """The rule of an operator element by element, whose operands' shapes are aligned at the end (None: a number)."""

    def describe(*tensors):
        def element(*i):
            symbols, values = iter(tensors), []
            for shape in shapes:
                at = zip(
                    i[len(out) - len(shape or ()) :],
                    shape or (),
                    out[len(out) - len(shape or ()) :],
                    strict=True,
                )
                read = lambda at: next(symbols)[tuple(0 if n == 1 != m else k for k, n, m in at)]
                values.append(1 if shape is None else read(at))
            return LINEAR[name](*values) if name in LINEAR else apply(*values)

        return element

    return analyse(describe, sum(s is not None for s in shapes), len(out))


def reduction(op: str, rank: int, dims: tuple[int, ...], keep: bool) -> Rule:
    """The rule of a sum or maximum over some dimensions; with `keep` they stay, with length one."""

    def describe(x):
        def element(*i):
            left = range(rank) if keep else [d for d in range(rank) if d not in dims]
            kept = dict(zip(left, i, strict=True))
            over = {d: Index(f"r{d}") for d in dims}
            at = tuple((kept | over)[d] for d in range(rank))
            return Expr("reduce", (op, tuple(over.values()), x[at]))

        return element

    return analyse(describe, 1, rank if keep else rank - len(dims))


def permutation(dims: tuple[int, ...]) -> Rule:
    """The rule of a transposition: dimension d of the result is dimension dims[d] of x."""
    back = [dims.index(d) for d in range(len(dims))]
    return analyse(lambda x: lambda *i: x[tuple(i[d] for d in back)], 1, len(dims))


@checked(rank=(1, 64))
def look_up(rank: int) -> Rule:
    """The rule of an embedding by indices of `rank` dimensions."""
    return analyse(lambda w, t: lambda *i: w[t[i[:-1]], i[-1]], 2, rank + 1)


@checked(rank=(1, 64))
def look_up_backward(rank: int) -> Rule:
    """The rule of an embedding's gradient: each row is the sum over the places where it was looked up."""
    at = tuple(Index(f"r{d}") for d in range(rank))
    row = lambda grad, t: lambda v, c: Expr("reduce", ("sum", at, grad[(*at, c)] * same(t[at], v)))
    return analyse(row, 2, 2)


@checked(rank=(1, 64))
def pick(rank: int, dim: int) -> Rule:
    """The rule of `gather`: of each row along `dim` the one element that the index names."""
    dim %= rank
    return analyse(lambda x, t: lambda *i: x[(*i[:dim], t[i], *i[dim + 1 :])], 2, rank)


@checked(rank=(1, 64))
def put(rank: int, dim: int) -> Rule:
    """The rule of `scatter` of a number: it replaces the one element of each row along `dim` that the index names."""
    dim %= rank
    named = lambda t, i: same(t[(*i[:dim], 0, *i[dim + 1 :])], i[dim])
    return analyse(lambda x, t: lambda *i: apply(named(t, i), x[i]), 2, rank)


@checked(rank=(1, 64))
def windows(rank: int, dim: int) -> Rule:
    """The rule of `unfold`: for each place along `dim` a window of x, as a further dimension at the end."""
    return analyse(lambda x: lambda *i: x[(*i[:dim], i[dim] + i[-1], *i[dim + 1 : -1])], 1, rank)


@checked(rank=(1, 64))
def windows_backward(rank: int, dim: int) -> Rule:
    """The rule of the backward of `unfold`: the sum of what all windows say about a place."""
    a = Index("a")
    told = lambda grad, i: grad[(*i[:dim], i[dim] - a, *i[dim + 1 :], a)]
    return analyse(lambda grad: lambda *i: Expr("reduce", ("sum", (a,), told(grad, i))), 1, rank)


def constant(rank: int) -> Rule:
    """The rule of numbers that are known from their place: they can be made in any cut."""
    return analyse(lambda: lambda *i: apply(*i), 0, rank)


@lru_cache(maxsize=10_000)
def rule(
    name: str, shapes: tuple, out: tuple[int, ...], dims: tuple[int, ...] = (), keep: bool = False
) -> Rule:
    """The rule of ATen's operator `name` on operands of these shapes (None: a number) with a result of shape `out`.

    Raises ValueError for an operator that nobody has described.
    """
    first, rank = len(shapes[0] or ()) if shapes else 0, len(out)
    if name in POINTWISE:
        return pointwise(name, shapes, out)
    if name in PRODUCTS:
        return analyse(PRODUCTS[name])
    made = {
        "sum": lambda: reduction("sum", first, dims, keep),
        "amax": lambda: reduction("max", first, dims, keep),
        "permute": lambda: permutation(dims),
        "embedding": lambda: look_up(rank - 1),
        "embedding_dense_backward": lambda: look_up_backward(first - 1),
        "gather": lambda: pick(rank, *dims),
        "scatter": lambda: put(rank, *dims),
        "unfold": lambda: windows(rank, *dims),
        "unfold_backward": lambda: windows_backward(rank, *dims),
        **dict.fromkeys(("full", "arange", "scalar_tensor"), lambda: constant(rank)),
    }
    if name not in made:
        raise ValueError(
            f"operator {name!r} has no description. Add it to gpt2lab/sharding/operators.py as a lambda over indices, "
            "or decompose it when capturing."
        )
    return made[name]()
