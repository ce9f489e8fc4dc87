"""Tensors as the backend wants them: contiguous, of equal shapes, unknown to autograd; and their bytes."""

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
    """Raise ValueError for a tensor that autograd follows: its gradient would silently stop here."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{op} has no backward of its own. Use {instead}, or detach the tensor.")


def fresh(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: gloo touches the wrong memory of a strided tensor, silently."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def ranked(x: torch.Tensor, op: str) -> torch.Tensor:
    """Contiguous integers in the order of the floats of x, for a max or min; `unranked` takes them back.

    A backend compares floats with `<`, which a NaN always fails, so it would depend on the rank whether a NaN is
    seen. The bits of a float, read as an integer, have the order of the numbers (those of negative ones once all but
    the sign are flipped), and a NaN stands beyond infinity: on the side where op looks for it. 16 bits become 32.
    """
    wide = x.detach().float() if x.element_size() < 4 else x.detach()
    wide = wide.masked_fill(wide.isnan(), torch.nan if op == "max" else -torch.nan)
    return _flipped(wide.contiguous().view(_INTEGERS[wide.dtype]))


def unranked(integers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The floats of which `ranked` made these integers."""
    wide = next(w for w, i in _INTEGERS.items() if i == integers.dtype)
    return _flipped(integers).view(wide).to(dtype)


_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _flipped(integers: torch.Tensor) -> torch.Tensor:
    """All bits but the sign flipped in negative numbers; the same once more gives the input back."""
    return torch.where(integers < 0, integers ^ torch.iinfo(integers.dtype).max, integers)


def padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """Contiguous x, lengthened with zeros along dim 0: gloo wants chunks of one shape."""
    if x.size(0) < length:
        x = torch.cat([x, x.new_zeros(length - x.size(0), *x.shape[1:])])
    return x.contiguous()
