"""A loss that never holds the whole logits: the head and the cross-entropy in chunks of tokens, gradient by hand.

The logits (B, T, V) of GPT-2 are the largest tensor of a small step, with V = 50257 far larger than anything else.
Here each chunk's logits use one buffer that the next chunk overwrites. Forward already computes the gradients
(softmax minus one-hot, times the weight and times x), so no product is done twice; backward only scales them.
"""

import torch

IGNORED = -100  # a target that does not count


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, buffer, wanted):
        """Sum, in 64 bits, of the token losses of x (N, C) against targets (N,); `buffer` is (rows, V)."""
        total = x.new_zeros((), dtype=torch.float64)
        of_x, of_weight = (torch.empty_like(x), torch.empty_like(weight)) if wanted else (None, None)
        starts = range(0, max(1, len(x)), len(buffer))  # a rank may own no token: one empty piece
        for rows, ys, start in zip(x.split(len(buffer)), targets.split(len(buffer)), starts, strict=True):
            p = torch.mm(rows, weight.T, out=buffer[: len(rows)])  # logits, and soon their gradient
            counts = ys != IGNORED
            place = ys.where(counts, 0)[:, None]
            behind = p.amax(-1).double() - p.gather(1, place)[:, 0]  # the target's logit, the largest one
            torch.softmax(p, -1, out=p)
            losses = behind - p.amax(-1).double().log()  # of the largest probability, which cannot underflow
            total += losses.where(counts, 0.0).sum()
            if wanted:
                p.scatter_add_(1, place, p.new_full((), -1.0).expand(place.shape))
                p[~counts] = 0.0  # usually none
                torch.mm(p, weight, out=of_x[start : start + len(rows)])
                of_weight.addmm_(p.T, rows, beta=float(start > 0))  # the first one overwrites
        ctx.gradients = of_x, of_weight
        return total

    @staticmethod
    def backward(ctx, grad):
        of_x, of_weight = ctx.gradients
        del ctx.gradients
        return of_x.mul_(grad), of_weight.mul_(grad), None, None, None


class ChunkedLoss:
    """Replaces `model.loss`; `apply_chunked_loss` makes the head give it x instead of logits."""

    def __init__(self, model, rows: int = 128):
        self.model, self.rows, self.buffer = model, rows, None

    def __call__(self, x, targets):
        """Sum of the token losses of the normed last activations x (B, T, C) and targets (B, T)."""
        weight = self.model.wte.weight
        rows = max(1, min(self.rows, targets.numel()))
        if self.buffer is None or self.buffer.dtype != x.dtype or len(self.buffer) != rows:
            self.buffer = x.new_empty(rows, len(weight))
        wanted = torch.is_grad_enabled()  # autograd needs it even if no gradient is used
        return _ChunkedLoss.apply(x.flatten(0, 1), weight, targets.flatten(), self.buffer, wanted)


def apply_chunked_loss(model, rows: int = 128) -> None:
    """Let a model for training compute head and loss together, `rows` tokens at a time; its output is no logits then.

    Raises nothing; a model that generates keeps its ordinary head. Memory: rows V numbers instead of B T V.
    """
    if model.ln_f is None:
        return
    model.loss = ChunkedLoss(model, rows)
    model.head = lambda x, pick=None: model.ln_f(x)
