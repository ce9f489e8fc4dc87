"""Plain values as JSON: what a judge and an answer's process say to each other.

Reading them makes numbers, texts, lists, arrays, tensors and dataclasses of this package, and runs nothing that came
with them: a process that nobody trusts may send what it likes.
"""

import base64
import dataclasses
import sys
from collections.abc import Callable
from fractions import Fraction
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace

import numpy as np
import torch

SCALARS = (bool, int, float, str, type(None))
GROUPS = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
VIEWS = (type({}.keys()), type({}.values()), type({}.items()), torch.Size)
FORMS = {  # what these are made of
    complex: ("real", "imag"),
    range: ("start", "stop", "step"),
    slice: ("start", "stop", "step"),
    Fraction: ("numerator", "denominator"),
}
FORM_OF = {kind.__name__: kind for kind in FORMS}
DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


class NotPlain(BaseException):
    """A value that cannot be told to another process. Not an Exception: no checker's own `except` hides it."""


def encode(value, offer: Callable):
    """The value as what `json` writes; `offer(function)` is the number by which the other process may call it.

    Raises NotPlain for anything that would not be the same over there, such as an object with a class of its own.
    """
    kind = type(value)
    told = lambda values: [encode(v, offer) for v in values]
    if kind in SCALARS:
        return value
    if kind.__name__ in GROUPS and kind is GROUPS[kind.__name__]:
        return {kind.__name__: told(value)}
    if kind in FORMS:
        return {kind.__name__: told(getattr(value, name) for name in FORMS[kind])}
    if kind is dict:
        return {"dict": [told(pair) for pair in value.items()]}
    if kind is bytes:
        return {"bytes": _text(value)}
    if kind is SimpleNamespace:
        return {"namespace": encode(vars(value), offer)}
    if kind in VIEWS:
        return {"tuple": told(value)}
    if kind is np.ndarray or isinstance(value, np.generic):
        return {"array": _array(value), "number": isinstance(value, np.generic)}
    if kind in (torch.Tensor, torch.nn.Parameter):
        return {"tensor": _tensor(value)}
    if kind is torch.dtype:
        return {"dtype": str(value)}
    if dataclasses.is_dataclass(kind) and _known(path := f"{kind.__module__}:{kind.__qualname__}") is kind:
        return {"made": path, "of": told(getattr(value, f.name) for f in dataclasses.fields(kind))}
    if isinstance(value, FUNCTIONS):
        return {"function": offer(value)}
    raise NotPlain(f"a {kind.__name__} is no plain value (numbers, texts, lists, arrays, tensors)")


def decode(tree, reach: Callable):
    """What `encode` was given; `reach(number)` makes the function that stands for one of the other process.

    Raises ValueError, or another Exception, for what `encode` does not write.
    """
    read = lambda trees: [decode(t, reach) for t in trees]
    match tree:
        case None | bool() | int() | float() | str():
            return tree
        case {"dict": pairs}:
            return dict(map(read, pairs))
        case {"bytes": text}:
            return base64.b64decode(text)
        case {"namespace": names}:
            return SimpleNamespace(**decode(names, reach))
        case {"iterator": trees}:
            return iter(read(trees))
        case {"array": [kind, shape, text], "number": alone}:
            numbers = np.frombuffer(base64.b64decode(text), _numbers(kind))
            return numbers[0] if alone else numbers.reshape(shape).copy()
        case {"tensor": [kind, shape, text]}:
            data = np.frombuffer(base64.b64decode(text), np.uint8).copy()
            return (
                torch.from_numpy(data).view(DTYPES[kind]).reshape(shape)
                if len(data)
                else torch.empty(shape, dtype=DTYPES[kind])
            )
        case {"dtype": name}:
            return DTYPES[name]
        case {"made": path, "of": trees} if kind := _known(path):
            made = object.__new__(kind)
            for field, value in zip(dataclasses.fields(kind), read(trees), strict=True):
                object.__setattr__(made, field.name, value)
            return made
        case {"function": int(number)}:
            return reach(number)
        case dict() if len(tree) == 1:
            ((name, trees),) = tree.items()
            return FORM_OF[name](*read(trees)) if name in FORM_OF else GROUPS[name](read(trees))
    raise ValueError("this is no plain value")


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
        case torch.Tensor(), torch.Tensor() if old.shape == new.shape and old.dtype == new.dtype:
            with torch.no_grad():
                old.copy_(new)
        case _:
            return new
    return old


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _array(value) -> list:
    if value.dtype.kind not in "biufc":
        raise NotPlain(f"an array of {value.dtype} is no plain value")
    return [value.dtype.str, list(value.shape), _text(value.tobytes())]


def _numbers(kind: str) -> np.dtype:
    if (found := np.dtype(kind)).kind not in "biufc":
        raise ValueError(f"an array of {kind} is no plain value")
    return found


def _tensor(value: torch.Tensor) -> list:
    if value.requires_grad or value.grad is not None:
        raise NotPlain("a tensor that autograd follows is no plain value")
    plain = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return [
        str(value.dtype),
        list(value.shape),
        _text(bytes(plain.view(torch.uint8).numpy()) if len(plain) else b""),
    ]


def _known(path: str):
    """The dataclass of this package that a path names; None where there is none."""
    module, _, name = path.partition(":")
    found = sys.modules.get(module) if module.startswith("gpt2lab.") else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None
