"""Operators as lambdas over indices, and what can be read off them: how they can be cut, and what that sends.

    matmul = lambda A, B: lambda i, j: Sum(lambda k: A[i, k] * B[k, j])

An index of the result cuts the result and every tensor that it indexes. An index of a sum cuts the tensors, and
leaves a partial sum; where something that is not linear is done to the sum afterwards, the sum must be completed
first, and its terms travel. A result that is linear in some tensors may be partial where they are. Nothing is listed
by hand: `analyse` calls the lambda with symbols and looks at the expression.

Wang, Huang & Li 2019, "Supporting Very Large Models using Automatic Dataflow Graph Partitioning" (Tofu), section 4.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..machine.arguments import checked
from .expression import Expr, Index, Tensor, Window, children, lift

Placement = int | str | None  # of one tensor on one axis: the dimension that is cut, "sum", "max", or whole


@dataclass(frozen=True)
class Option:
    """One way to run an operator over one mesh axis: where inputs and result lie, and what travels inside.

    `index` is what is cut ("" for none, "partial" where inputs are partial sums). `messages` are (op, indices) of
    inner results that are summed over the axis; `halos` are (input, dimension) whose edges come from neighbours.
    """

    index: str
    inputs: tuple[Placement, ...]
    output: Placement
    messages: tuple[tuple[str, tuple[str, ...]], ...] = ()
    halos: tuple[tuple[int, int], ...] = ()

    @property
    def free(self) -> bool:
        """Whether nothing travels inside."""
        return not self.messages and not self.halos


@dataclass(frozen=True)
class Rule:
    """What an expression says: the index of each dimension (None: has to be whole), and the options."""

    inputs: tuple[tuple[str | None, ...], ...]
    output: tuple[str | None, ...]
    options: tuple[Option, ...]


@checked(tensors=(0, 100), rank=(0, 100))
def analyse(describe: Callable, tensors: int | None = None, rank: int | None = None) -> Rule:
    """The rule of `describe(*tensors)(*indices)`; how many of each is read off the lambdas' own parameters.

    Raises ValueError for a tensor that is read with different numbers of indices.
    """
    count = len(_names(describe, tensors, "tensors"))
    element = describe(*map(Tensor, range(count)))
    names = _names(element, rank, "indices")
    return _Analysis(lift(element(*map(Index, names))), names, count).rule()


def _names(call: Callable, count: int | None, what: str) -> list[str]:
    """Names for the arguments of a lambda: its own, or `count` others, if it takes as many. Raises ValueError."""
    if count is None:
        return list(inspect.signature(call).parameters)
    try:
        inspect.signature(call).bind(*range(count))
    except TypeError:
        raise ValueError(f"The lambda does not take {count} {what}. Give as many as it names.") from None
    return [f"i{n}" for n in range(count)]


class _Analysis:
    """One expression, its result's indices, and how many tensors it reads."""

    def __init__(self, root: Expr, names: list[str], count: int):
        self.root, self.names, self.count = root, names, count
        self.reads: list[list[tuple]] = [[] for _ in range(count)]
        self.reduces: list[Expr] = []
        self._walk(root)
        self.same = {}
        for reads in self.reads:
            if len({len(at) for at in reads}) > 1:
                raise ValueError("a tensor is read with different numbers of indices.")
            for column in zip(*reads, strict=True):
                self._join(column)

    def _walk(self, e: Expr) -> None:
        if e.kind == "access":
            self.reads[e.args[0]].append(e.args[1])
        if e.kind == "reduce":
            self.reduces.append(e)
        for child in children(e):
            self._walk(child)

    def _join(self, column) -> None:
        """Indices that run over the same dimension of a tensor are cut together, unless both are the result's."""
        plain = [one.name for one in column if isinstance(one, Index)]
        for name in plain[1:]:
            a, b = self.name(plain[0]), self.name(name)
            if a != b and not (a in self.names and b in self.names):
                keep, drop = (a, b) if a in self.names else (b, a)
                self.same[drop] = keep

    def name(self, name: str) -> str:
        while name in self.same:
            name = self.same[name]
        return name

    def labels(self, at: tuple) -> tuple[str | None, ...]:
        """The index of each dimension of one access; a window has that of its middle."""
        plain = lambda one: one.at if isinstance(one, Window) else one
        return tuple(self.name(plain(one).name) if isinstance(plain(one), Index) else None for one in at)

    def rule(self) -> Rule:
        inputs = []
        for reads in self.reads:
            columns = zip(*map(self.labels, reads), strict=True)
            inputs.append(tuple(column[0] if len(set(column)) == 1 else None for column in columns))
        output = tuple(self.name(n) for n in self.names)
        every = [*output, *(self.name(i.name) for e in self.reduces for i in e.args[1])]
        cuts = [self._cut(label, inputs, output) for label in dict.fromkeys(every)]
        whole = Option("", (None,) * self.count, None)
        return Rule(tuple(inputs), output, (*filter(None, cuts), *self._partials(), whole))

    def _cut(self, label, inputs, output) -> Option | None:
        """The option that cuts one index, or None where it cannot be cut."""
        places = [_place(labels, label) for labels in inputs]
        mixed = any(
            label in self.labels(at) and (labels.count(label) > 1 or place is None)
            for reads, labels, place in zip(self.reads, inputs, places, strict=True)
            for at in reads
        )
        windows = {
            (number, dim): one
            for number, reads in enumerate(self.reads)
            for at in reads
            for dim, one in enumerate(at)
            if isinstance(one, Window)
        }
        if mixed or any(self.name(one.inner.name) == label for one in windows.values()):
            return None  # an index that is also needed whole, or of two dimensions, or the inside of a window
        ways = () if label in output else self._sets()
        needed = next((terms for terms in ways if self.flow(self.root, label, terms) == "term"), None)
        op = next((e.args[0] for e in self.reduces if e is self.root and self._over(e, label)), "sum")
        root = needed is not None  # then all sums over the label are completed at once, at the end
        inner = [e for e in self.reduces if self._over(e, label)] if not root else []
        if label not in output and not root and not inner:
            return None
        inner = {self._labelled(e): e for e in inner}.values()
        messages = tuple((e.args[0], tuple(sorted(self._free(e)))) for e in inner)
        for number in needed or ():
            places[number] = "sum"
        result = _place(output, label) if label in output else op if root else None
        halos = tuple(at for at, one in windows.items() if self.name(one.at.name) == label)
        return Option(label, tuple(places), result, messages, halos)

    def _over(self, e: Expr, label: str) -> bool:
        return e.kind == "reduce" and any(self.name(i.name) == label for i in e.args[1])

    def _labelled(self, e) -> tuple | str:
        """An expression with labels instead of indices: equal for equal sums, whatever their indices are called."""
        if isinstance(e, Index):
            return self.name(e.name)
        args = e.args if isinstance(e, Expr) else e
        return (getattr(e, "kind", ""), *map(self._labelled, args)) if isinstance(args, tuple) else repr(e)

    def _free(self, e: Expr) -> set[str]:
        """The indices of the result of a reduction: those of its body that it does not reduce."""
        if e.kind == "access":
            return {label for label in self.labels(e.args[1]) if label}
        free = set().union(*map(self._free, children(e)))
        if e.kind == "index":
            free = {self.name(e.args[0].name)}
        return free - ({self.name(i.name) for i in e.args[1]} if e.kind == "reduce" else set())

    def flow(self, e: Expr, label: str | None, terms: frozenset[int]) -> str | None:
        """What e is on ranks that share out an index, and hold the tensors `terms` as terms of sums over the ranks.

        "whole", alike on all of them; "cut", each rank's own; "term", of a sum (or at the root maximum); else None.
        """
        below = [self.flow(child, label, terms) for child in children(e)]
        if self._over(e, label):
            completed = e.args[0] == "sum" or e is self.root
            return "term" if completed and not {"term", None} & {*below} else None
        if e.kind == "access" and e.args[0] in terms:
            return "term"
        if None in below:
            return None
        if "term" not in below:
            return "cut" if "cut" in below or label in self._free(e) else "whole"
        linear = {
            "add": {*below} == {"term"},
            "scale": True,
            "mul": sorted(below) == ["term", "whole"],
            "div": below == ["term", "whole"],
            "where": below == ["whole", "term", "term"],
            "reduce": e.args[0] == "sum",
        }
        return "term" if linear.get(e.kind) else None

    def _sets(self) -> Iterator[frozenset[int]]:
        """All sets of inputs, the smaller ones first."""
        for size in range(self.count + 1):
            yield from map(frozenset, itertools.combinations(range(self.count), size))

    def _partials(self) -> list[Option]:
        """The sets of inputs in which the result is linear: where these are partial, so is the result."""
        linear = [terms for terms in self._sets() if self.flow(self.root, None, terms) == "term"]
        places = [tuple("sum" if n in terms else None for n in range(self.count)) for terms in linear]
        return [Option("partial", at, "sum") for at in places]


def _place(labels, label) -> int | None:
    return labels.index(label) if label in labels else None
