"""Descriptions of operators as lambdas over indices; `gpt2lab.sharding.describe` reads off them how they can be cut.

`LIBRARY` has the well-known ones as one expression each. `rule` describes an operator of a captured program, by its
name in ATen, from the shapes of its operands.
"""

from collections.abc import Callable
from functools import lru_cache

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
    *("gelu", "tanh", "exp", "log", "rsqrt", "sqrt", "pow", "reciprocal", "rsub", "clamp"),
    "round",  # whatever makes whole numbers
    *("ge", "lt", "ne", "eq", "maximum", "minimum", "bitwise_and", "bitwise_not", "logical_not"),
}
RESHAPES = ("view", "unsqueeze", "squeeze")

PRODUCTS = {
    "mm": LIBRARY["matmul"],
    "addmm": lambda b, A, B: lambda i, j: b[j] + Sum(lambda k: A[i, k] * B[k, j]),
    "bmm": lambda A, B: lambda n, i, j: Sum(lambda k: A[n, i, k] * B[n, k, j]),
}


def pointwise(name: str, shapes: tuple, out: tuple[int, ...]) -> Rule:
    """The rule of an operator element by element, whose operands' shapes are aligned at the end (None: a number)."""

    def describe(*tensors):
        def element(*i):
            symbols = iter(tensors)

            def value(shape):
                if shape is None:
                    return 1
                behind = len(out) - len(shape)
                at = zip(i[behind:], shape, out[behind:], strict=True)
                return next(symbols)[tuple(0 if n == 1 != m else k for k, n, m in at)]

            return LINEAR.get(name, apply)(*map(value, shapes))

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


def moves(rank: int, dims: tuple[int, ...]) -> dict[str, Callable]:
    """The lambdas of operators that move, look up or make elements: a result (or gradient) of `rank`, along `dims`.

    `permute`: dimension d of the result is dimension dims[d] of x. `embedding`: rows that t names; its gradient is for
    each row the sum over the places where it was looked up. `gather`: of each row along d the element that t names;
    `scatter` of a number replaces it. `unfold`: for each place along d a window of x, as a further dimension at the
    end; its gradient is the sum of what all windows say about a place. Constants are known from their place.
    """
    d, a = (dims or (0,))[0], Index("a")
    places = tuple(Index(f"r{n}") for n in range(rank - 1))
    put = lambda i, one: (*i[:d], one, *i[d + 1 :])
    total = lambda over, body: Expr("reduce", ("sum", over, body))
    return {
        "permute": lambda x: lambda *i: x[tuple(i[dims.index(n)] for n in range(rank))],
        "embedding": lambda w, t: lambda *i: w[t[i[:-1]], i[-1]],
        "embedding_dense_backward": lambda g, t: (
            lambda v, c: total(places, g[(*places, c)] * same(t[places], v))
        ),
        "gather": lambda x, t: lambda *i: x[put(i, t[i])],
        "scatter": lambda x, t: lambda *i: apply(same(t[put(i, 0)], i[d]), x[i]),
        "unfold": lambda x: lambda *i: x[put(i[:-1], i[d] + i[-1])],
        "unfold_backward": lambda g: lambda *i: total((a,), g[(*put(i, i[d] - a), a)]),
        **dict.fromkeys(("full", "arange", "scalar_tensor"), lambda: lambda *i: apply(*i)),
    }


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
    if name in ("sum", "amax"):
        return reduction("sum" if name == "sum" else "max", first, dims, keep)
    described = moves(first if name == "embedding_dense_backward" else rank, dims)
    if name not in described:
        raise ValueError(
            f"operator {name!r} has no description. Add it to gpt2lab/sharding/operators.py as a lambda over indices, "
            "or decompose it when capturing."
        )
    return analyse(described[name], rank=rank)
