"""Plain values as JSON: what a judge and an answer's process say to each other.

Reading them makes numbers, texts, lists, arrays, tensors and dataclasses of this package, and runs nothing that came
with them: a process that nobody trusts may send what it likes.
"""

import base64
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence, Set
from fractions import Fraction
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace

import numpy as np
import torch

NUMBERS = "biufc"
"""Kinds of arrays that are plain values."""
SCALARS = (bool, int, float, str, type(None))
DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
ALIKE = dict.fromkeys((type({}.keys()), type({}.values()), type({}.items()), torch.Size), tuple)
ALIKE |= {torch.nn.Parameter: torch.Tensor}
"""Classes of which a value is told as one of another class."""
BASES = {str: str.__str__, int: int.__int__, float: float.__float__, tuple: tuple, frozenset: frozenset}
BASES |= {Mapping: dict, MappingView: tuple, Set: set, Sequence: list, Iterator: list}
"""What a value of any class below the first is told as where only its content matters."""


class NotPlain(BaseException):
    """A value that cannot be told to another process. Not an Exception: no checker's own `except` hides it."""


def _array(value) -> list:
    if value.dtype.kind not in NUMBERS:
        raise NotPlain(f"an array of {value.dtype} is no plain value")
    return [value.dtype.str, value.tobytes(), *value.shape]


def _array_of(name: str, data: bytes, *shape: int) -> np.ndarray:
    if (kind := np.dtype(name)).kind not in NUMBERS:
        raise ValueError(f"an array of {kind} is no plain value")
    return np.frombuffer(data, kind).reshape(shape).copy()


def _tensor(value: torch.Tensor) -> list:
    if value.requires_grad or value.grad is not None:
        raise NotPlain("a tensor that autograd follows is no plain value")
    plain = torch.empty(value.shape, dtype=value.dtype).copy_(value).reshape(-1).view(torch.uint8)
    return [str(value.dtype), bytes(plain.numpy()), value.untyped_storage().nbytes(), *value.shape]


def _tensor_of(name: str, data: bytes, behind: int, *shape: int) -> torch.Tensor:
    """With as many bytes of memory `behind` it, up to 64 MB: of a view more than are its own."""
    memory = torch.zeros(max(len(data), min(behind, 2**26)), dtype=torch.uint8)
    memory[: len(data)] = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
    return memory[: len(data)].view(DTYPES[name]).reshape(shape)


FORMS = {  # a class: what a value is told as (parts, which are plain values), and what makes it of them again
    **{kind: (list, lambda *parts, kind=kind: kind(parts)) for kind in (list, tuple, set, frozenset)},
    **{kind: (attrgetter("start", "stop", "step"), kind) for kind in (range, slice)},
    complex: (attrgetter("real", "imag"), complex),
    Fraction: (attrgetter("numerator", "denominator"), Fraction),
    dict: (dict.items, lambda *pairs: dict(pairs)),
    SimpleNamespace: (lambda names: [vars(names)], lambda names: SimpleNamespace(**names)),
    bytes: (lambda data: [base64.b64encode(data).decode()], base64.b64decode),
    np.ndarray: (_array, _array_of),
    np.generic: (_array, lambda *parts: _array_of(*parts)[()]),
    torch.Tensor: (_tensor, _tensor_of),
    torch.dtype: (lambda kind: [str(kind)], DTYPES.__getitem__),
}
MAKERS = {kind.__name__: made for kind, (_, made) in FORMS.items()} | {"iterator": lambda *parts: iter(parts)}


def encode(value, offer: Callable, content: bool = False):
    """The value as what `json` writes; `offer(function)` is the number by which the other process may call it.

    Raises NotPlain for anything that would not be the same over there, such as an object with a class of its own;
    where only the `content` matters, a container of any class is plain, and so is an array of texts.
    """
    if type(value) in SCALARS:
        return value
    if content and (plain := _content(value)) is not value:
        return encode(plain, offer, content)
    if isinstance(value, FUNCTIONS):
        return {"function": offer(value)}
    kind = np.generic if isinstance(value, np.generic) else ALIKE.get(type(value), type(value))
    if kind in FORMS:
        name, parts = kind.__name__, FORMS[kind][0](value)
    elif dataclasses.is_dataclass(kind) and _known(name := f"{kind.__module__}:{kind.__qualname__}") is kind:
        parts = (getattr(value, f.name) for f in dataclasses.fields(kind))
    else:
        raise NotPlain(f"a {kind.__name__} is no plain value (numbers, texts, lists, arrays, tensors)")
    return {name: [encode(part, offer, content) for part in parts]}


def _content(value):
    """The same in a class of Python's own, if it has a class that is like one."""
    if isinstance(value, np.ndarray | np.generic):
        return value if value.dtype.kind in NUMBERS else value.tolist()
    if type(value) in FORMS or type(value) in ALIKE:
        return value
    return next((base(value) for kind, base in BASES.items() if isinstance(value, kind)), value)


def decode(tree, reach: Callable):
    """What `encode` was given; `reach(number)` makes the function that stands for one of the other process.

    Raises ValueError, or another Exception, for what `encode` does not write.
    """
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case {"function": int(number)}:
            return reach(number)
        case dict() if len(tree) == 1:
            ((name, trees),) = tree.items()
            parts = [decode(part, reach) for part in trees]
            return MAKERS[name](*parts) if name in MAKERS else _made(_known(name), parts)
    raise ValueError("this is no plain value")


def _known(path: str):
    """The dataclass of this package that a path names; None where there is none."""
    module, _, name = path.partition(":")
    found = sys.modules.get(module) if module.startswith("gpt2lab.") else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


def _made(kind: type, parts: list):
    """An object of a dataclass with these fields, of which none of its own code has run."""
    made = object.__new__(kind)
    for field, value in zip(dataclasses.fields(kind), parts, strict=True):
        object.__setattr__(made, field.name, value)
    return made


def renew(old, new):
    """What stands for `old` now that an answer has made it `new`: the same object where its content can be changed."""
    match old, new:
        case list(), list():
            old[:] = [renew(a, b) for a, b in zip(old, new, strict=False)] + new[len(old) :]
        case dict(), dict():
            now = {key: renew(old[key], value) if key in old else value for key, value in new.items()}
            old.clear()
            old.update(now)
        case set(), set():
            old.clear()
            old.update(new)
        case tuple(), tuple():
            return tuple(renew(a, b) for a, b in zip(old, new, strict=False)) + new[len(old) :]
        case SimpleNamespace(), SimpleNamespace():
            renew(vars(old), vars(new))
        case np.ndarray(), np.ndarray() if old.shape == new.shape and old.dtype == new.dtype:
            old[...] = new
        case torch.Tensor(), torch.Tensor() if old.dtype == new.dtype:
            with torch.no_grad():
                old.copy_(new) if old.shape == new.shape else old.set_(new)
        case _:
            return new
    return old
