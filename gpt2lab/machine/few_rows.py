"""Products of few rows, as a model has that writes one token after the other, at the speed of memory."""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class FewRows(TorchFunctionMode):
    """A linear layer of few rows reads its weight as fast as memory gives it: as a batch of blocks of the weight.

    MKL multiplies a matrix with one row on one thread, at half that speed on AMD's processors; its batched product
    takes all threads. Where the outputs cannot be cut into equal blocks the layer is computed as usual.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear and args[0].is_cpu and args[0].numel() <= 8 * args[0].size(-1):
            return _in_blocks(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _in_blocks(x, weight, bias=None):
    """`F.linear` of x (..., in) and weight (out, in)."""
    (out, width), threads = weight.shape, max(torch.get_num_threads(), 2)
    blocks = next((n for n in range(threads, 128) if out % n == 0), 0)
    if not blocks or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, width).t().expand(blocks, -1, -1)  # (blocks, in, rows)
    y = torch.bmm(weight.view(blocks, -1, width), rows).reshape(out, -1).t().reshape(*x.shape[:-1], out)
    return y if bias is None else y + bias
