"""What was wrong with the arguments of a call that failed, in one sentence; asked only after it has failed."""

import inspect
from numbers import Integral

import torch

from .axis import Axis

POSITIONS = ("root", "to", "source")


def reason(call, args, options, error: Exception) -> str:
    """What was wrong with the arguments of a call that raised an error; empty where it failed for another reason."""
    try:
        bound = inspect.signature(call).bind(*args, **options)
    except TypeError:  # Python has said what is missing
        return ""
    bound.apply_defaults()
    why = _wrong(bound.arguments)
    if not why and "pickle" in str(error):
        return f"{error}. Send numbers, strings, tensors, or lists and dicts of them."
    return why


def _wrong(given: dict) -> str:
    """What is wrong with a call's arguments."""
    axis = given.get("axis")
    if not isinstance(axis, Axis):
        return (
            f"axis={axis!r} is a {type(axis).__name__}, not an axis. Use one of a mesh, such as mesh['dp']."
        )
    for name in ("x", "like", "shard"):
        if name in given and not isinstance(given[name], torch.Tensor):
            kind = type(given[name]).__name__
            return f"{name} is a {kind}, not a tensor. Use torch.tensor(...)."
    if not all(isinstance(part, torch.Tensor) for part in given.get("parts", ())):
        return f"its parts are no tensors. Use {axis.size}, one per rank."
    for name in POSITIONS:
        if name in given and not _index(given[name], axis.size):
            return f"{name}={given[name]!r} is no position on axis {axis.name!r}. Use 0 to {axis.size - 1}."
    return _wrong_cut(given["x"], axis, given["dim"], given["sizes"]) if "dim" in given else ""


def _wrong_cut(x, axis: Axis, dim, sizes) -> str:
    """What is wrong with how a tensor is cut along a dimension."""
    if not _index(dim, x.dim()):
        least = f"Use 0 to {x.dim() - 1}" if x.dim() else "Use x.view(1)"
        return f"dim={dim!r} is no dimension of a tensor of shape {tuple(x.shape)}. {least}."
    if sizes is None or all(isinstance(n, Integral) and n >= 0 for n in sizes):
        return ""  # the call itself has compared them with the tensor
    return (
        f"sizes={list(sizes)} do not fit length {x.size(dim)} on {axis.size} ranks. Use one length per rank."
    )


def _index(value, length: int) -> bool:
    return isinstance(value, Integral) and -length <= value < length
