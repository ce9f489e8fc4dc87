"""Tensor parallelism: every matrix of a layer is cut over the ranks, and every rank works on all tokens.

A column-parallel layer has a slice of the output features, a row-parallel one a slice of the input features. One
after the other they need no message between them: gelu and attention work feature by feature and head by head.

Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
section 3, arXiv:1909.08053.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ..model import picked, summable
from ..ranks import comm
from ..ranks.mesh import Axis
from . import spec


class Edge:
    """Where activations pass from whole (B, T, C) on every rank to parts, and back: Megatron's f and g.

    Forward: `enter` sends nothing, `leave` sums over the ranks. Backward: `enter` sums, `leave` sends nothing.
    Bytes per rank: one all-reduce of (B, T, C) in each of them, 2 (n-1)/n B T C numbers.
    With `overlap` the all-reduce of `enter` runs while the weight's gradient is computed.
    """

    def __init__(self, axis: Axis, overlap: bool = False):
        self.axis, self.overlap = axis, overlap

    def enter(self, x):
        """f: each rank uses x differently, so the gradient is the sum of all ranks'."""
        return comm.copy_to(x, self.axis)

    def leave(self, x):
        """g: x is a partial sum on each rank; its sum is used alike on all, so the gradient is already whole."""
        return comm.reduce_from(x, self.axis)

    def back(self, grad, x):
        """A handle of the gradient of x as it was before it entered, given what came in, and x as it entered."""
        return comm.all_reduce(grad, self.axis, async_op=True, own=True), x

    def linear(self, x, weight, bias=None):
        """A linear layer on x as it enters: (B, T, C) to (B, T, features of this rank)."""
        if self.overlap and torch.is_grad_enabled():
            return _EnteringLinear.apply(x, weight, bias, self)
        return F.linear(self.enter(x), weight, bias)


class _EnteringLinear(torch.autograd.Function):
    """`F.linear(edge.enter(x), weight, bias)` that keeps x for backward.

    There `edge.back` sends, if it can, while the weight's gradient is computed.

    A GPU with several hardware queues may start the product first, and the sum finds no free processor until it ends.
    With CUDA_DEVICE_MAX_CONNECTIONS=1 kernels start in the order of their calls (Megatron-LM asks for it here:
    `core/tensor_parallel/layers.py`); the plan's line for launching sets it. On a CPU it changes nothing.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, edge):
        ctx.save_for_backward(x, weight)
        ctx.edge, ctx.biased = edge, bias is not None
        return F.linear(edge.enter(x), weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        under_way, entered = ctx.edge.back(grad @ weight, x)
        of_weight, of_bias = weight_gradients(grad, entered, ctx.biased)
        return under_way.wait(), of_weight, of_bias, None


def weight_gradients(grad, x, biased: bool):
    """Gradients of a linear layer's weight and bias: grad (B, T, out) and x (B, T, in)."""
    flat = grad.flatten(0, 1)
    return flat.T @ x.flatten(0, 1), flat.sum(0) if biased else None


class ColumnLinear(nn.Module):
    """A linear layer of which this rank has a slice of the outputs; `groups` thirds of the fused q, k, v."""

    def __init__(self, linear: nn.Linear, edge: Edge, groups: int = 1):
        super().__init__()
        self.edge = edge
        self.weight = spec.cut(linear.weight, edge.axis, 0, groups)
        self.bias = spec.cut(linear.bias, edge.axis, 0, groups)

    def forward(self, x):  # (B, T, C) -> (B, T, features / n)
        return self.edge.linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer of which this rank has a slice of the inputs; the bias is added once, after the sum."""

    def __init__(self, linear: nn.Linear, edge: Edge):
        super().__init__()
        self.edge = edge
        self.weight, self.bias = spec.cut(linear.weight, edge.axis, 1), linear.bias

    def forward(self, x):  # (B, T, features / n) -> (B, T, C)
        return self.edge.leave(F.linear(x, self.weight)) + self.bias


class VocabEmbedding(nn.Module):
    """An embedding of which this rank has the rows of some tokens; for the others it adds zero to the sum.

    Bytes per rank: one all-reduce of (B, T, C) forward, none backward.
    """

    def __init__(self, embedding: nn.Embedding, edge: Edge):
        super().__init__()
        self.edge = edge
        self.weight = spec.cut(embedding.weight, edge.axis, 0)
        self.first = first_token(embedding.weight.size(0), edge.axis)

    def forward(self, tokens):  # (B, T) -> (B, T, C)
        place = tokens - self.first
        here = (place >= 0) & (place < len(self.weight))
        return self.edge.leave(F.embedding(place.where(here, 0), self.weight) * here[..., None])


def first_token(vocab_size: int, axis: Axis) -> int:
    """The first token of the vocabulary on this rank."""
    return sum(comm.split_sizes(vocab_size, axis.size)[: axis.rank])


SWAPS = {  # the strategy at a glance: what becomes of each layer of a block
    "attn.c_attn": partial(ColumnLinear, groups=3),
    "attn.c_proj": RowLinear,
    "mlp.c_fc": ColumnLinear,
    "mlp.c_proj": RowLinear,
}


def apply_tensor(model, mesh, plan=None, overlap: bool = False) -> None:
    """Cut every block by `SWAPS`, the embedding, the tied head and the loss by the vocabulary.

    Forward: two all-reduces of (B, T, C) a layer, where row-parallel layers end; one for the embedding; the loss
    sends three numbers a token. Backward: two a layer, where column-parallel layers begin; one for the head.
    Bytes per rank: 4 all-reduces of (B, T, C) a layer and step, 8 (n-1)/n B T C numbers (section 3 of the paper).
    Attention's heads are cut too: each third of q, k, v by heads. Norms and row biases are replicated.
    """
    edge = Edge(mesh["tp"], overlap)
    for block in model.h.values():
        for name, kind in SWAPS.items():
            parent, child = name.split(".")
            part = getattr(block, parent)
            if hasattr(part, child):  # a mixture's experts are cut by `apply_expert`
                setattr(part, child, kind(getattr(part, child), edge))
    if model.wte is not None:
        model.wte = VocabEmbedding(model.wte, edge)
    if model.ln_f is not None:
        model.head = partial(vocab_head, model, edge)
        model.loss = VocabLoss(edge.axis, first_token(model.config.vocab_size, edge.axis))


def vocab_head(model, edge: Edge, x, pick=None):
    """The logits (B, T, V / n) of this rank's tokens; the head is tied to its slice of the embedding."""
    x = model.ln_f(x)
    if pick is not None:
        return F.linear(picked(edge.enter(x), pick), model.wte.weight)
    return edge.linear(x, model.wte.weight)


class VocabLoss:
    """Sum of the token losses of logits that are cut along the vocabulary; the logits are never sent.

    Forward: the largest logit of each token (B T numbers), then the sums of exponentials and the target's logit
    (2 B T). Backward: nothing, softmax minus one-hot needs only what this rank has.
    Bytes per rank: all-reduces of B T and of 2 B T numbers, instead of gathering B T V.
    """

    def __init__(self, axis: Axis, first: int):
        self.axis, self.first = axis, first

    def __call__(self, logits, targets):  # (B, T, V / n), (B, T)
        return _VocabLoss.apply(summable(logits).flatten(0, 1), targets.flatten(), self.axis, self.first)


class _VocabLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, axis, first):
        top = comm.all_reduce(logits.amax(-1), axis, "max")
        p = (logits - top[:, None]).exp_()
        place = targets - first
        here = (place >= 0) & (place < logits.size(-1))
        chosen = logits.gather(-1, place.where(here, 0)[:, None])[:, 0] - top
        sums = torch.stack([p.sum(-1), chosen.where(here, 0)])
        total, target = comm.all_reduce(sums, axis, own=True)
        counts = targets != -100
        ctx.save_for_backward(p.div_(total[:, None]), place.where(here, 0), here, counts)
        return (total.log() - target).where(counts, 0.0).sum()

    @staticmethod
    def backward(ctx, grad):
        p, place, here, counts = ctx.saved_tensors
        d = p * (grad * counts)[:, None]
        d.scatter_add_(-1, place[:, None], (-grad * here)[:, None].to(d.dtype))
        return d, None, None, None


def whole_logits(logits, axis: Axis, vocab_size: int):
    """The logits of the whole vocabulary on every rank, for generation: `gather` of `generate.generate`."""
    return comm.gather_replicated(logits, axis, -1, comm.split_sizes(vocab_size, axis.size))


def check(config, plan, rows: int, length: int) -> None:
    """Raise ValueError where the heads do not divide by the ranks, or there are fewer tokens than ranks.

    The hidden layer and the vocabulary may be uneven: their slices then differ by one.
    """
    heads, n = config.n_head, plan.tp
    if heads % n:
        fits = [str(d) for d in range(1, heads + 1) if heads % d == 0]
        use = f"{', '.join(fits[:-1])} or {fits[-1]}" if len(fits) > 1 else fits[0]
        raise ValueError(
            f"{heads} attention head{'s' * (heads > 1)} cannot be split over tp={n} ranks "
            f"({heads} % {n} = {heads % n}). Use tp={use}."
        )
    if config.vocab_size < n:
        raise ValueError(
            f"{config.vocab_size} tokens of a vocabulary cannot be split over tp={n} ranks. "
            f"Use tp={config.vocab_size} or less."
        )
