"""What lesson 07 runs besides its own pipeline: instruments, a gradient that shrinks."""

from types import SimpleNamespace
from unittest.mock import patch

import torch

from ...ranks import comm
from ...verify import relative_error
from .instruments import mine as mine  # cells call it


def compared(found, loss: float, want: dict[str, torch.Tensor]) -> None:
    """Print what ranks returned, (part of the loss, gradients, ...) each, beside the serial loss and gradients."""
    every = [(n, g) for _, grads, *_ in found for n, g in grads.items()]
    same = sum(torch.equal(g, want[n]) for n, g in every)
    apart = [(relative_error(g, want[n]), n) for n, g in every]
    worst = max(apart)[0]
    name = next(n for one, n in apart if one > (1 - 1e-9) * worst)  # of equal ones the first
    print("loss equal to 1e-12:", abs(sum(part for part, *_ in found) - loss) < 1e-12)
    print(f"{same} of {len(every)} gradients equal bit for bit")
    print("largest difference:", "below 1e-12" if worst < 1e-12 else f"{worst:.2g}, in {name}")


def divided(run):
    """F and B as `run` does them, but what arrives in B is divided by the number of micro-batches once more."""

    def wrong(kind, i, s):
        right = comm.irecv

        def smaller(like, axis, source):
            value = right(like, axis, source).wait()
            return SimpleNamespace(wait=lambda: value / len(s.batch) if kind == "B" else value)

        with patch.object(comm, "irecv", smaller):
            run(kind, i, s)

    return wrong
