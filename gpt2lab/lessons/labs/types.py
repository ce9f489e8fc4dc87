"""Types of a parallel program: what a tensor is on each mesh axis, and with it what its gradient will be.

R: the same on all ranks, used differently by each; its gradient is a sum not yet made. I: the same on all, used alike;
its gradient is the same on all. V: another on each rank. P: terms whose sum is meant. Only calls of `comm` change a
type. The gradient's type follows from the tensor's, so that a forward alone, on one process, tells a wrong backward.

Types know no numbers: counts, factors, dimensions, indices and seeds are not seen.
JAX and meta-pytorch/spmd_types (DESIGN.md, "Local SPMD") have these rules; it lets a sum read V as P, as here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from ...ranks import comm

GRADIENT = {"R": "P", "P": "R", "I": "I", "V": "V"}
ARROWS = {  # what a call takes, and what it makes of that on its axis; a constant has no gradient, and so no type
    "copy_to": ("I", "R"),  # Megatron's f
    "reduce_from": ("PV", "I"),  # Megatron's g
    "all_gather": ("V", "R"),
    "gather_replicated": ("V", "I"),
    "reduce_scatter": ("PV", "V"),
    "scatter_to": ("I", "V"),
    "all_to_all": ("V", "V"),
    "ring_shift": ("V", "V"),
    "broadcast": ("V", "R"),  # of what the root has
    "reduce": ("PV", "V"),
    "gather": ("V", "V"),
    "scatter": ("V", "V"),
    "all_reduce": ("PV", ""),
}
ADDED = "add", "sub", "iadd", "isub", "add_", "sub_"
SCALED = "sum mean neg mul imul mul_ div div_ matmul linear"
SHAPED = "flatten unflatten view view_as reshape transpose movedim split chunk getitem"
LINEAR = f"{SCALED} {SHAPED} clone detach contiguous get copy_ to".split()
VALUES = {"copy_": slice(1, None), "view_as": slice(1)}  # of the other argument only the shape counts


class IllTyped(ValueError):
    """A program whose backward would be wrong; says the operator, the types, the axis and the way out."""


class Types(TorchFunctionMode):
    """Inside, what is made of tensors that have types (`give`) gets types, and what has no right gradient is refused.

    A tensor without a type on an axis is a constant there. Raises IllTyped.
    """

    def __init__(self):
        super().__init__()
        self.known = {}  # by id; the tensor is kept, so that no other gets its id

    def give(self, x: torch.Tensor, **types: str) -> torch.Tensor:
        """Say what x is, by axis: `give(x, dp="V", tp="I")`."""
        self.known[id(x)] = {axis: kind for axis, kind in types.items() if kind}, x
        return x

    def of(self, x: torch.Tensor) -> dict[str, str]:
        """The types of x by axis."""
        return self.known[id(x)][0] if id(x) in self.known else {}

    def said(self, function, *given) -> dict[str, str] | str:
        """The types of what a function makes, or why it is refused."""
        try:
            return self.of(function(*given))
        except IllTyped as error:
            return str(error)

    def __torch_function__(self, function, _, args=(), kwargs=None):
        made, named = function(*args, **(kwargs or {})), kwargs or {}
        name = function.__name__.removeprefix("__").removesuffix("__")
        if "empty" in name:
            made.zero_()  # on one process nothing arrives in it
        given = [self.of(t) for t in _tensors([*args[VALUES.get(name, slice(None))], *named.values()])]
        numbers = [x for x in (*args, named.get("other")) if isinstance(x, int | float) and x]
        given += [{} for _ in numbers if name in ADDED]  # each rank would add it
        for y in _tensors([args[0] if name == "setitem" else made]):
            if name != "get" or id(y) not in self.known:  # p.grad has a type of its own
                axes = sorted({axis for types in given for axis in types})
                kinds = {axis: [types.get(axis, "") for types in given] for axis in axes}
                self.give(y, **{axis: _joined(name, axis, kinds[axis]) for axis in axes})
        return made

    @contextmanager
    def calls(self) -> Iterator["Types"]:
        """Inside, every call of `comm` checks the types of what it is given, and says those of its result."""
        with patch.multiple(comm, **{name: self._typed(getattr(comm, name)) for name in ARROWS}), self:
            yield self

    def _typed(self, call):
        takes, makes = ARROWS[call.__name__]

        @wraps(call)
        def typed(x, axis, *args, **options):
            types = {}
            for t in _tensors([x]):
                types |= self.of(t)
            for name in axis.name.split("+") if axis.size > 1 else ():
                if (kind := types.get(name, "")) and kind not in takes:
                    raise IllTyped(
                        f"{call.__name__} of {kind} on axis {name}: it takes {' or '.join(takes)}."
                    )
                types |= {name: makes if kind else ""}
            made = call(x, axis, *args, **options)
            for y in _tensors([made.wait() if hasattr(made, "wait") else made]):
                self.give(y, **types)
            return made

        return typed


def _joined(name: str, axis: str, kinds: list[str]) -> str:
    """What an operator makes of tensors of these kinds."""
    found = {kind for kind in kinds if kind}
    said = f"{name}({', '.join(kind or 'constant' for kind in kinds)}) on axis {axis}"
    if "I" in found and len(found) > 1:
        raise IllTyped(
            f"{said}: the gradient of I would be one rank's part. Make it R first (f), or sum (g)."
        )
    if "P" in found:
        terms = kinds.count("P")
        sums = name in (*ADDED, "cat", "stack") and terms == len(kinds)
        scaled = name in LINEAR and terms == 1 and len(kinds) < 3 and found <= {"P", "R"}
        scaled &= not name.startswith("div") or kinds[0] == "P"
        if not sums and not scaled:
            raise IllTyped(f"{said}: of terms this is not what it is of their sum. Sum first (g).")
        return "P"
    return "V" if "V" in found else found.pop() if found else ""


def _tensors(values) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results, in lists too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
