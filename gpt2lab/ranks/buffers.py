"""Tensors in the form that a backend accepts: contiguous, of equal shapes, detached from autograd; and their bytes."""

from collections.abc import Sequence

import torch


def byte_size(x: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def byte_sizes(x: torch.Tensor, sizes: Sequence[int], dim: int) -> list[int]:
    """Bytes of the chunks of `sizes` of a tensor like x along dim."""
    line = x.element_size()
    for d, length in enumerate(x.shape):
        line *= 1 if d == dim % x.dim() else length
    return [line * s for s in sizes]


def no_graph(
    op: str, x: torch.Tensor, instead: str = "copy_to (sums in backward) or reduce_from (in forward)"
):
    """Raise ValueError for a tensor that requires a gradient: the gradient would silently stop here."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{op} has no backward of its own. Use {instead}, or detach the tensor.")


def fresh(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: gloo silently reads and writes the wrong memory of a strided tensor."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def ranked(x: torch.Tensor, op: str) -> torch.Tensor:
    """Contiguous integers in the same order as the floats of x, for a max or min; `unranked` is the inverse.

    A backend compares floats with `<`, which is false for a NaN, so the result would depend on the rank that has the
    NaN. The bits of a float, read as an integer, are ordered like the numbers (for negative numbers after all bits
    except the sign are flipped). A NaN gets the sign that makes it the result of `op`. 16 bits become 32.
    """
    wide = x.detach().float() if x.element_size() < 4 else x.detach()
    wide = wide.masked_fill(wide.isnan(), torch.nan if op == "max" else -torch.nan)
    return _flipped(wide.contiguous().view(_INTEGERS[wide.dtype]))


def unranked(integers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The floats that `ranked` turned into these integers."""
    wide = next(w for w, i in _INTEGERS.items() if i == integers.dtype)
    return _flipped(integers).view(wide).to(dtype)


_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _flipped(integers: torch.Tensor) -> torch.Tensor:
    """Negative numbers with all bits except the sign flipped; applied twice it gives the input."""
    return torch.where(integers < 0, integers ^ torch.iinfo(integers.dtype).max, integers)


def padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """Contiguous x, padded with zeros along dim 0 to `length`: gloo needs chunks of equal shape."""
    if x.size(0) < length:
        x = torch.cat([x, x.new_zeros(length - x.size(0), *x.shape[1:])])
    return x.contiguous()
