"""What the tasks of GPT-2 compute: each operation forward and, written by hand, backward, into given tensors.

Shapes: n tokens (of several sequences, one after the other), C channels, O outputs, r sequences of T tokens, H heads
of D channels. Results come last in the arguments, constants after them.
"""

import math

import torch

EPS = 1e-5  # of layer norms


def embed(tokens, wte, wpe, x):
    """x (n, C): token plus position embeddings of whole sequences; wpe (T, C)."""
    torch.index_select(wte, 0, tokens, out=x)
    x.view(-1, len(wpe), x.size(1)).add_(wpe)


def embed_backward(tokens, dx, dwte, first: int):
    """Add to dwte, the gradient of the vocabulary from `first` on, the rows of dx (n, C) with such tokens."""
    rows = ((tokens >= first) & (tokens < first + len(dwte))).nonzero().flatten()
    dwte.index_add_(0, tokens[rows] - first, dx[rows])


def layer_norm(x, weight, bias, y, stats):
    """y (n, C); stats (n, 2) keeps each row's mean and one over its standard deviation."""
    out = {"out0": y, "out1": stats[:, :1], "out2": stats[:, 1:]}
    torch.ops.aten.native_layer_norm.out(x, (x.size(1),), weight, bias, EPS, **out)


def layer_norm_backward(dy, x, stats, weight, dx, residual=None):
    """dx (n, C): the gradient through the norm, plus that of the residual stream beside it, if there is one."""
    xhat, g = (x - stats[:, :1]).mul_(stats[:, 1:]), dy * weight
    along = torch.linalg.vecdot(g, xhat).div_(x.size(1)).unsqueeze(1)
    torch.sub(g, g.mean(1, keepdim=True), out=dx)
    dx.addcmul_(xhat, along, value=-1).mul_(stats[:, 1:])
    if residual is not None:
        dx.add_(residual)


def layer_norm_weights(dy, x, stats, dweight, dbias):
    """Gradients (C,) of weight and bias, summed over all tokens."""
    xhat = (x - stats[:, :1]).mul_(stats[:, 1:])
    torch.sum(xhat.mul_(dy), 0, out=dweight)
    torch.sum(dy, 0, out=dbias)


def linear(x, weight, bias, y):
    """y (n, O) = x W^T + b."""
    torch.addmm(bias, x, weight.t(), out=y)


def linear_residual(x, weight, bias, residual, y):
    """y (n, O) = residual + x W^T + b."""
    torch.addmm(bias, x, weight.t(), out=y)
    y.add_(residual)


def linear_gelu(x, weight, bias, before, y):
    """y (n, O) = gelu(x W^T + b), in the form with tanh; `before` keeps what goes into it."""
    torch.addmm(bias, x, weight.t(), out=before)
    torch.ops.aten.gelu.out(before, approximate="tanh", out=y)


def linear_backward(dy, weight, dx):
    """dx (n, C) = dy W."""
    torch.mm(dy, weight, out=dx)


def gelu_backward(dy, weight, before, dbefore):
    """The gradient (n, O) before the gelu, from that of the linear layer after it."""
    x = before
    t = torch.tanh((x + 0.044715 * x**3).mul_(math.sqrt(2 / math.pi)))
    slope = (3 * 0.044715 * x * x).add_(1).mul_(math.sqrt(2 / math.pi)).mul_(x)
    slope.mul_(1 - t * t).add_(t).add_(1).mul_(0.5)
    torch.mm(dy, weight, out=dbefore)
    dbefore.mul_(slope)


def linear_weights(dy, x, dweight, dbias):
    """Gradients of W (O, C) and b (O,), summed over all tokens."""
    torch.mm(dy.t(), x, out=dweight)
    torch.sum(dy, 0, out=dbias)


def split_heads(x, rows: int, size: int):
    """(r, H, T, D) of x (r T, H D), without a copy."""
    return x.unflatten(1, (-1, size)).unflatten(0, (rows, -1)).transpose(1, 2)


def attention(q, *others, size: int):
    """Causal attention of T tokens that end a sequence of U; `size` is D.

    `others`: k and v, each (r t, H D), of every slice of the sequence, the own one last; `shares` (r, H, T, U), which
    keeps the softmax; y (r T, H D), the result.
    """
    *keys, shares, y = others
    q, k, v = _whole(q, keys, len(shares), size)
    ahead = torch.ones(shares.shape[-2:], dtype=torch.bool).triu_(1 + k.size(2) - q.size(2))
    scores = (q @ k.transpose(-1, -2)).mul_(1 / math.sqrt(size)).masked_fill_(ahead, -math.inf)
    torch.softmax(scores, -1, out=shares)
    split_heads(y, len(shares), size).copy_(shares @ v)


def attention_backward(dy, q, *others, size: int):
    """The gradient of q, then those of k and v of every slice; `others`: k and v as above, shares, the gradients."""
    n = len(others) // 2 - 1
    keys, shares, dq, gradients = others[:n], others[n], others[n + 1], others[n + 2 :]
    q, k, v = _whole(q, keys, len(shares), size)
    dy = split_heads(dy, len(shares), size)
    dshares = dy @ v.transpose(-1, -2)
    dscores = dshares.sub_((dshares * shares).sum(-1, keepdim=True)).mul_(shares).mul_(1 / math.sqrt(size))
    split_heads(dq, len(shares), size).copy_(dscores @ k)
    for x, y, outputs in ((dscores, q, gradients[::2]), (shares, dy, gradients[1::2])):
        outputs = [split_heads(out, len(shares), size) for out in outputs]
        parts = (x.transpose(-1, -2) @ y).split([out.size(2) for out in outputs], 2)
        for out, part in zip(outputs, parts, strict=True):
            out.copy_(part)


def _whole(q, keys, rows: int, size: int):
    """q, k and v (r, H, T or U, D), with all slices joined."""
    parts = [split_heads(t, rows, size) for t in keys]
    k, v = (parts[j] if len(parts) == 2 else torch.cat(parts[j::2], 2) for j in (0, 1))
    return split_heads(q, rows, size), k, v


def add(total, part):
    """Add `part` to `total`."""
    total.add_(part)


def positions_backward(dx, dwpe, rows: int, first: int):
    """dwpe: the sum of dx (r T, C) over the r sequences, at T positions from `first` on."""
    part = dx.unflatten(0, (rows, -1)).sum(0)
    dwpe.zero_()[first : first + len(part)] = part


def logits(x, wte, y):
    """y (n, V) = x wte^T: the head is tied to the token embedding."""
    torch.mm(x, wte.t(), out=y)


def head_backward(dlogits, wte, dx, scale: float):
    """dx (n, C), from the gradients (n, V) of the sum of the losses, of which `scale` makes the mean."""
    torch.addmm(dx, dlogits, wte, beta=0, alpha=scale, out=dx)


def head_weights(dlogits, x, dwte, scale: float):
    """The head's part of the gradient of wte (V, C)."""
    torch.addmm(dwte, dlogits.t(), x, beta=0, alpha=scale, out=dwte)


def loss(targets, scores, losses):
    """Losses (n,) of the tokens; `scores` (n, V) become the gradients of their sum. Targets below 0 do not count."""
    torch.log_softmax(scores, -1, out=scores)
    rows, counts = torch.arange(len(targets)), targets >= 0
    at = targets.clamp(min=0)
    torch.mul(scores[rows, at], -1.0 * counts, out=losses)
    scores.exp_()
    scores[rows, at] -= 1
    scores[~counts] = 0
