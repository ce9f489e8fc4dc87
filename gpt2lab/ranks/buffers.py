"""Tensors in the form that a backend accepts: contiguous, cut into one part a rank, with NaNs that it can compare."""

from collections.abc import Sequence

import torch

from .traffic import split_sizes

Sizes = Sequence[int] | None


def shard_sizes(op: str, x, axis, dim: int, sizes: Sizes) -> list[int]:
    """The lengths of the ranks' shards along dim; ValueError if they are not one per rank, of which x has mine."""
    sizes = list(sizes or [x.size(dim)] * axis.size)
    if len(sizes) != axis.size or sizes[axis.rank] != x.size(dim):
        here = f"rank {axis.rank} of {axis.size} holds {x.size(dim)}"
        raise ValueError(f"{op}: {here} along dim {dim}, but sizes={sizes}.")
    return sizes


def chunk_sizes(op: str, x, axis, dim: int, sizes: Sizes) -> list[int]:
    """The lengths of the ranks' chunks of x along dim; ValueError if they do not fill it."""
    sizes = list(sizes or split_sizes(x.size(dim), axis.size))
    if len(sizes) != axis.size or sum(sizes) != x.size(dim):
        parts = f"{axis.size} parts, one per rank"
        raise ValueError(f"{op}: sizes={sizes} do not cut length {x.size(dim)} into {parts}.")
    return sizes


def byte_sizes(x: torch.Tensor, sizes: Sequence[int], dim: int) -> list[int]:
    """Bytes of the chunks of `sizes` of a tensor like x along dim."""
    line = x.element_size()
    for d, length in enumerate(x.shape):
        line *= 1 if d == dim % x.dim() else length
    return [line * s for s in sizes]


def padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """Contiguous x, padded with zeros along dim 0 to `length`: gloo needs chunks of equal shape."""
    if x.size(0) < length:
        x = torch.cat([x, x.new_zeros(length - x.size(0), *x.shape[1:])])
    return x.contiguous()


def unpadded(parts: Sequence[torch.Tensor], sizes: Sequence[int], dim: int) -> torch.Tensor:
    """Padded parts without their padding, one after the other along dim."""
    return torch.cat([p[:s] for p, s in zip(parts, sizes, strict=True)]).movedim(0, dim)


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
