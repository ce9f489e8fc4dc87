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


def padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """Contiguous x, lengthened with zeros along dim 0: gloo wants chunks of one shape."""
    if x.size(0) < length:
        x = torch.cat([x, x.new_zeros(length - x.size(0), *x.shape[1:])])
    return x.contiguous()
