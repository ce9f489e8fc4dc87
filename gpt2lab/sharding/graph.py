"""A program as a graph: each value is an input or made by an operator from values before it.

Its dimensions are those that can be cut: where a reshape joins batch and tokens to one dimension, or splits 3 C
features into q, k, v, heads and width, the graph keeps the factors apart. A `Builder` finds them: dimensions that an
operator indexes alike are the same, and a reshape refines both sides to common factors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from .describe import Option, Rule


@dataclass(frozen=True)
class Node:
    """One value: made by `op` from `inputs` in one of `options`; an input of the program has no options.

    `shape` are the lengths of its factors; `groups` says how many factors each dimension of the real tensor has.
    `element` are bytes an element; `call` is what an interpreter needs, which nobody here reads.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    groups: tuple[int, ...]
    options: tuple[Option, ...]
    element: int = 8
    call: object = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """How many elements the whole value has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Graph:
    """Nodes by name, each after those that it reads; `outputs` pairs a result's name with the value.

    `names` are the names of the dimensions of some inputs, for marks such as `heads:y`; `aliases` are further names
    of values, also for marks.
    """

    nodes: dict[str, Node]
    outputs: dict[str, str]
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> list[str]:
        """The names of the program's inputs."""
        return [n.name for n in self.nodes.values() if n.op == "input"]

    def readers(self) -> dict[str, list[str]]:
        """Who reads each value, by name; a result of the program counts as a reader called `output`."""
        found = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            for name in node.inputs:
                found[name].append(node.name)
        for name in self.outputs.values():
            found[name].append("output")
        return found


class _Factor:
    """A factor of a dimension, which may turn out to be a product of others."""

    def __init__(self, size: int):
        self.size, self.parts = size, None

    def flat(self) -> list["_Factor"]:
        return [self] if self.parts is None else _flatten(self.parts)


def _factors(length: int) -> list[_Factor]:
    """A dimension of this length; one of length 1 has no factors."""
    return [_Factor(length)] if length > 1 else []


def _flatten(factors: Sequence[_Factor]) -> list[_Factor]:
    """All factors down to those that are not products."""
    return [one for factor in factors for one in factor.flat()]


def _unify(a: Sequence[_Factor], b: Sequence[_Factor]) -> None:
    """Make two lists of factors the same, the outermost first, splitting where one is a multiple of the other.

    Raises ValueError where they have no common factors.
    """
    a, b = _flatten(a), _flatten(b)
    text = " x ".join(str(f.size) for f in a), " x ".join(str(f.size) for f in b)
    while a and b:
        x, y = a.pop(0), b.pop(0)
        if x is y:
            continue
        if x.size > y.size:
            x, y, a, b = y, x, b, a
        if y.size % x.size:
            raise ValueError(
                f"a reshape from {text[0]} to {text[1]} mixes dimensions, so none of them can be cut."
            )
        rest = y.size // x.size
        y.parts = [x] if rest == 1 else [x, _Factor(rest)]
        b[:0] = y.parts[1:]


class Builder:
    """Collects the operators of a program, and finds the factors of all dimensions."""

    def __init__(self):
        self.dims: dict[str, list[list[_Factor]]] = {}
        self.made: list[tuple] = []

    def add(self, name: str, op: str, inputs: Sequence[str], shape: Sequence[int], how, element=8, call=None):
        """One operator: `how` is its Rule, "view", ("piece", dim) or ("join", dim); None for an input."""
        if 0 in shape:
            raise ValueError(
                f"{name} of shape {tuple(shape)} has no elements. Use at least 1 in each dimension."
            )
        fresh = [_factors(n) for n in shape]
        if isinstance(how, Rule):
            self._index(how, inputs, fresh)
        elif how == "view":
            _unify(sum(self.dims[inputs[0]], []), sum(fresh, []))
        elif how is not None:
            how = (*how, self._divide(how, inputs, fresh))
        self.dims[name] = fresh
        self.made.append((name, op, tuple(inputs), how, element, call))

    def _index(self, rule: Rule, inputs, fresh) -> None:
        known, windows = {}, {at for option in rule.options for at in option.halos}
        tensors = [*zip(rule.inputs, [self.dims[i] for i in inputs], strict=True), (rule.output, fresh)]
        for n, (labels, dims) in enumerate(tensors):
            for d, (label, factors) in enumerate(zip(labels, dims, strict=True)):
                if label is not None and factors and (n, d) not in windows:
                    first = known.setdefault(label, factors)
                    if len({math.prod(f.size for f in one) for one in (first, factors)}) > 1:
                        raise ValueError(
                            "an operator reads a part of a dimension. Give it all of it, or narrow before."
                        )
                    _unify(first, factors)

    def _divide(self, how, inputs, fresh) -> list[_Factor]:
        """The factors that count equal pieces: along `dim`, one of them is picked, or all are joined."""
        kind, dim = how
        whole, part = (self.dims[inputs[0]], fresh) if kind == "piece" else (fresh, self.dims[inputs[0]])
        length = lambda dims: math.prod(f.size for f in dims[dim])
        count = _factors(length(whole) // length(part))
        _unify(whole[dim], [*count, *part[dim]])
        for other in [fresh] if kind == "piece" else [self.dims[i] for i in inputs]:
            for d, factors in enumerate(other):
                _unify(factors, part[dim] if d == dim else whole[d])
        return count

    def finish(self, outputs: dict[str, str], names: dict | None = None) -> Graph:
        """The graph of what the outputs need, with every operator's options on the factors."""
        dims = {name: [_flatten(d) for d in of] for name, of in self.dims.items()}
        nodes, needed = {}, set(outputs.values())
        for name, op, inputs, *_ in reversed(self.made):
            if name in needed or op == "input":
                needed |= {name, *inputs}
        for name, op, inputs, how, element, call in self.made:
            if name not in needed:
                continue
            groups = tuple(map(len, dims[name]))
            shape = tuple(f.size for d in dims[name] for f in d)
            options = _options(how, [dims[i] for i in inputs], dims[name])
            nodes[name] = Node(name, op, inputs, shape, groups, options, element, call)
        return Graph(nodes, outputs, names or {})


def _options(how, inputs: list, out: list) -> tuple[Option, ...]:
    if how is None:
        return ()
    if isinstance(how, Rule):
        outside = [option for option in how.options if not option.messages]
        return tuple(each for option in outside for each in _by_factor(option, inputs, out))
    kind, dim, pieces = ("view", 0, []) if how == "view" else how
    longer, count = inputs[0] if kind == "piece" else out, len(inputs)
    first = sum(map(len, longer[:dim]))
    counting = range(first, first + len(_flatten(pieces)))  # factors of the longer side alone
    others = enumerate(p for p in range(sum(map(len, longer))) if p not in counting)
    places = [(p, n) if kind == "piece" else (n, p) for n, p in others]  # of the inputs and of the result
    cuts = [Option(f"i{to}", (at,) * count, to) for at, to in places]
    whole, partial = Option("", (None,) * count, None), Option("partial", ("sum",) * count, "sum")
    return (*cuts, partial, whole)


def _by_factor(option: Option, inputs: list, out: list) -> list[Option]:
    """An option on real dimensions, once for each factor of the dimension that it cuts; one of length 1 has none."""
    if option.index in ("", "partial"):
        return [option]
    placed = [*zip(inputs, option.inputs, strict=True), (out, option.output)]
    counts = {len(dims[at]) for dims, at in placed if isinstance(at, int)}
    if len(counts) > 1 or option.halos and counts != {1}:
        return []  # windows slide over a whole dimension
    position = lambda dims, at, n: at if not isinstance(at, int) else sum(map(len, dims[:at])) + n
    halos = tuple((n, position(inputs[n], d, 0)) for n, d in option.halos)
    return [
        Option(
            option.index,
            tuple(position(dims, at, n) for dims, at in zip(inputs, option.inputs, strict=True)),
            position(out, option.output, n),
            halos=halos,
        )
        for n in range(max(counts))
    ]
