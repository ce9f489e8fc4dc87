"""Checkers of lesson 04: a bucketed reducer, bytes of a step, and the weight of unequal shares."""

import torch

from ...parallel.zero.costs import all_reduce_bytes
from . import close


class Line:
    """A link that remembers what it was asked to carry; sums arrive when waited for."""

    def __init__(self):
        self.messages, self.waited = [], 0

    def all_reduce(self, flat):
        """Start summing a flat tensor with that of another rank, which holds 1, 2, 3, ... in it."""
        self.messages.append(flat)
        return Sum(self, flat)


class Sum:
    """What `all_reduce` gives: `.wait()` returns the sum."""

    def __init__(self, line, flat):
        self.line, self.flat = line, flat.clone()

    def wait(self):
        """The sum of both ranks."""
        self.line.waited += 1
        return self.flat + torch.arange(1.0, len(self.flat) + 1, dtype=self.flat.dtype)


SIZES = {"head": 6, "second": 5, "first": 3, "embedding": 4}  # in the order in which backward finishes them


def reducer(answer) -> None:
    """Exercise: gradients join a bucket as they come; a full bucket leaves at once; finish() gives the sums."""
    line = Line()
    mine = {
        name: torch.full((size,), float(i), dtype=torch.float64)
        for i, (name, size) in enumerate(SIZES.items())
    }
    work = answer(line.all_reduce, 8)
    for name, grad in mine.items():
        work.ready(name, grad)
    assert line.messages, (
        "nothing was sent while backward ran: send a bucket as soon as it holds 8 elements or more"
    )
    assert not line.waited, (
        "you waited while backward ran: keep what all_reduce returns, and wait in finish()"
    )
    sums = work.finish()
    sent = [len(m) for m in line.messages]
    assert sums is not None, "finish() returned None: return the sums by name"
    assert sum(sent) >= 18, (
        f"only {sum(sent)} of 18 elements were sent: the last bucket is not full, and must go too"
    )
    assert sent != [6, 5, 3, 4], (
        "one message a tensor: let tensors gather until a bucket holds 8 elements or more"
    )
    assert sent == [11, 7], (
        f"messages of {sent} elements, expected [11, 7]: send when the bucket holds 8 or more"
    )
    assert set(sums) == set(mine), f"finish() returned {sorted(sums)}, expected {sorted(mine)}"
    where = {"head": 0, "second": 6, "first": 0, "embedding": 3}
    for name, grad in mine.items():
        other = torch.arange(1.0, len(grad) + 1, dtype=torch.float64) + where[name]
        close(sums[name], grad + other, f"{name} (each tensor gets its own stretch of the summed bucket)")


def step_bytes(answer) -> None:
    """Exercise: what one rank sends in a step of data parallelism."""
    close(answer(elements=1000, ranks=1, micro=1, each=4), 0, "a rank alone sends nothing")
    close(
        answer(1000, 4, 1, 4),
        all_reduce_bytes(1000, 4, 0, 4),
        "1000 floats, 4 ranks: reduce-scatter and all-gather, each (n-1)/n of 4000 bytes",
    )
    close(answer(1000, 4, 5, 4), 6000, "five micro-batches: only the last one's backward sends")
    close(answer(1000, 4, 1, 2), 3000, "16-bit gradients")


def global_gradient(answer) -> None:
    """Exercise: the gradient of the mean loss from per-rank means and token counts."""
    torch.manual_seed(0)
    grads = [torch.randn(3, dtype=torch.float64) for _ in range(3)]
    counts = [30, 20, 20]
    want = sum(g * c for g, c in zip(grads, counts, strict=True)) / 70
    got = answer([g.clone() for g in grads], counts)
    assert got is not None, "your function returned None. Is the return missing?"
    mean = sum(grads) / 3
    assert not torch.allclose(got, mean), (
        "that is the mean of means: ranks with 30 tokens must weigh more than those with 20"
    )
    assert not torch.allclose(got, sum(grads)), (
        "that is the sum of means: weigh each by its share of the 70 tokens"
    )
    close(got, want, "shares of 30, 20 and 20 tokens")
