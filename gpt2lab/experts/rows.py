"""From tokens to rows sorted by expert and back, in adjoint pairs, and one expert.

N is the tokens, C the embedding width, k how many experts a token asks for, M the pairs (token, expert) computed.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..model import GPT2Config


class Expert(nn.Module):
    """One MLP among many: GPT-2's with gelu, or a gated one without biases."""

    def __init__(self, config: GPT2Config, hidden: int, gated: bool):
        super().__init__()
        self.c_gate = nn.Linear(config.n_embd, hidden, bias=False) if gated else None
        self.c_fc = nn.Linear(config.n_embd, hidden, bias=not gated)
        self.c_proj = nn.Linear(hidden, config.n_embd, bias=not gated)

    def forward(self, x):  # (m, C)
        if self.c_gate is None:
            return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return self.c_proj(F.silu(self.c_gate(x)) * self.c_fc(x))


def by_expert(experts, count: int):
    """Choices (B, T, k), numbered 0 to B T k - 1, sorted by expert, in token order, and how many each expert has."""
    flat = experts.flatten()
    unused, *counts = torch.bincount(flat + 1, minlength=count + 1).split([1, count])
    return flat.argsort(stable=True)[int(unused) :], counts[0]


class Dispatch(torch.autograd.Function):
    """Rows x[token] (M, C) of x (N, C), each token as often as it has experts. Backward: a token's gradients add up."""

    @staticmethod
    def forward(ctx, x, token):
        ctx.save_for_backward(token)
        ctx.length = len(x)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx, grad):
        (token,) = ctx.saved_tensors
        return grad.new_zeros(ctx.length, grad.size(1)).index_add_(0, token, grad), None


class Combine(torch.autograd.Function):
    """Sums (N, C) of each token's rows (M, C), times their weights (M,): the adjoint of `Dispatch`, weighted.

    Backward: each row gets its token's gradient times its weight, each weight the product of row and gradient.
    """

    @staticmethod
    def forward(ctx, rows, weights, token, length):
        ctx.save_for_backward(rows, weights, token)
        weighted = (rows * weights[:, None]).to(weights.dtype)
        return weighted.new_zeros(length, rows.size(1)).index_add_(0, token, weighted)

    @staticmethod
    def backward(ctx, grad):
        rows, weights, token = ctx.saved_tensors
        grad = grad.index_select(0, token)
        return grad * weights[:, None], (grad * rows).sum(-1), None, None


class Attach(torch.autograd.Function):
    """y, unchanged; in backward the loss gets the gradient 1, wherever in the model y is."""

    @staticmethod
    def forward(ctx, y, loss):
        ctx.like = loss
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):
        return grad, None if ctx.like is None else torch.ones_like(ctx.like)
