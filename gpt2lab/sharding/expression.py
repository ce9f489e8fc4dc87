"""The language of descriptions: indices, elements of tensors, sums, and functions of which nothing is known."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from ..machine.arguments import checked


@dataclass(frozen=True)
class Index:
    """One index variable; `i + a` and `i - a` slide a window over a dimension."""

    name: str

    def __add__(self, other: "Index") -> "Window":
        return Window(self, other)

    __sub__ = __add__


@dataclass(frozen=True)
class Window:
    """`at + inner`: the dimension is read around `at`, as far as `inner` reaches."""

    at: Index
    inner: Index


@dataclass(frozen=True, eq=False)
class Expr:
    """A node of the expression: `kind` and its arguments."""

    kind: str
    args: tuple

    def __add__(self, other):
        return Expr("add", (self, lift(other)))

    def __radd__(self, other):
        return lift(other) + self

    def __neg__(self):
        return Expr("scale", (self,))

    def __sub__(self, other):
        return self + -lift(other)

    def __rsub__(self, other):
        return lift(other) + -self

    def __mul__(self, other):
        return Expr("mul", (self, lift(other)))

    def __rmul__(self, other):
        return lift(other) * self

    def __truediv__(self, other):
        return Expr("div", (self, lift(other)))


def lift(value) -> Expr:
    """A number or an index as an expression; expressions stay."""
    if isinstance(value, Expr):
        return value
    return Expr("index", (value,)) if isinstance(value, Index) else Expr("constant", (value,))


@dataclass(frozen=True)
class Tensor:
    """A symbol for an input; `T[i, k]` reads an element. An index that is itself read from a tensor is a look-up."""

    number: int

    def __getitem__(self, at) -> Expr:
        at = list(at) if isinstance(at, tuple) else [at]
        for place, one in enumerate(at):
            if isinstance(one, Expr):  # a sum over all rows, of which one counts
                row = Index(f"row{self.number}")
                read = self[(*at[:place], row, *at[place + 1 :])]
                return Expr("reduce", ("sum", (row,), read * same(one, row)))
        return Expr("access", (self.number, tuple(at)))


def apply(*values) -> Expr:
    """Some function, element by element, of which nothing is known."""
    return Expr("apply", tuple(map(lift, values)))


def same(value: Expr, index: Index) -> Expr:
    """One where the value is the index, zero elsewhere."""
    return apply(value, index)


def where(condition, yes, no) -> Expr:
    """`yes` where the condition holds, `no` elsewhere."""
    return Expr("where", (lift(condition), lift(yes), lift(no)))


@checked()
def Sum(body: Callable) -> Expr:
    """The sum over the indices that the lambda takes."""
    return _reduce("sum", body)


@checked()
def Max(body: Callable) -> Expr:
    """The maximum over the indices that the lambda takes."""
    return _reduce("max", body)


def _reduce(op: str, body: Callable) -> Expr:
    indices = tuple(Index(name) for name in inspect.signature(body).parameters)
    return Expr("reduce", (op, indices, lift(body(*indices))))


def children(e: Expr) -> list[Expr]:
    """The expressions right below one."""
    return [arg for arg in e.args if isinstance(arg, Expr)]
