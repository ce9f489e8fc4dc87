"""Forward and backward of GPT-2 written out layer by layer in plain tensor arithmetic, the way llm.c does it in C.

No autograd: every backward is a formula. Differences from llm.c are its padding of the vocabulary and its float32.
"""

import math

import torch

ROOT = math.sqrt(2 / math.pi)


def _layernorm(x, w, b):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    rstd = (variance + 1e-5).rsqrt()
    normed = (x - mean) * rstd
    return normed * w + b, (normed, rstd, w)


def _layernorm_backward(grad, kept):
    normed, rstd, w = kept
    dn = grad * w
    dx = rstd * (dn - dn.mean(-1, keepdim=True) - normed * (dn * normed).mean(-1, keepdim=True))
    return dx, (grad * normed).sum((0, 1)), grad.sum((0, 1))


def _matmul_backward(grad, x, w):
    flat = grad.flatten(0, 1)
    return grad @ w, flat.T @ x.flatten(0, 1), flat.sum(0)


def _gelu(x):
    return 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x**3)))


def _gelu_backward(grad, x):
    t = torch.tanh(ROOT * (x + 0.044715 * x**3))
    return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * ROOT * (1 + 3 * 0.044715 * x * x))


def _attention(qkv, heads):
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in qkv.chunk(3, -1))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
    future = torch.ones(q.size(-2), q.size(-2)).triu(1).bool()
    att = scores.masked_fill(future, -math.inf).softmax(-1)
    return (att @ v).transpose(1, 2).flatten(2), (q, k, v, att)


def _attention_backward(grad, kept):
    q, k, v, att = kept
    grad = grad.unflatten(-1, (q.size(1), -1)).transpose(1, 2)
    datt = grad @ v.transpose(-1, -2)
    dscores = att * (datt - (datt * att).sum(-1, keepdim=True)) / math.sqrt(q.size(-1))
    parts = (dscores @ k, dscores.transpose(-1, -2) @ q, att.transpose(-1, -2) @ grad)
    return torch.cat([t.transpose(1, 2).flatten(2) for t in parts], -1)


def _block(w, x, heads):
    n1, kept1 = _layernorm(x, w["ln_1.weight"], w["ln_1.bias"])
    att, kept_att = _attention(n1 @ w["attn.c_attn.weight"].T + w["attn.c_attn.bias"], heads)
    middle = x + att @ w["attn.c_proj.weight"].T + w["attn.c_proj.bias"]
    n2, kept2 = _layernorm(middle, w["ln_2.weight"], w["ln_2.bias"])
    up = n2 @ w["mlp.c_fc.weight"].T + w["mlp.c_fc.bias"]
    out = middle + _gelu(up) @ w["mlp.c_proj.weight"].T + w["mlp.c_proj.bias"]
    return out, (n1, kept1, att, kept_att, n2, kept2, up)


def _block_backward(w, grad, kept):
    n1, kept1, att, kept_att, n2, kept2, up = kept
    g = {}

    def linear(name, d, x):
        d, g[f"{name}.weight"], g[f"{name}.bias"] = _matmul_backward(d, x, w[f"{name}.weight"])
        return d

    d = _gelu_backward(linear("mlp.c_proj", grad, _gelu(up)), up)
    d, g["ln_2.weight"], g["ln_2.bias"] = _layernorm_backward(linear("mlp.c_fc", d, n2), kept2)
    grad = grad + d
    d = _attention_backward(linear("attn.c_proj", grad, att), kept_att)
    d, g["ln_1.weight"], g["ln_1.bias"] = _layernorm_backward(linear("attn.c_attn", d, n1), kept1)
    return grad + d, g


def gradients(w, config, tokens, targets):
    """Mean loss and the gradient of every parameter, by the model's names."""
    layers = [
        {n.removeprefix(f"h.{i}."): t for n, t in w.items() if n.startswith(f"h.{i}.")}
        for i in range(config.n_layer)
    ]
    x, kept = w["wte.weight"][tokens] + w["wpe.weight"][: tokens.size(1)], []
    for layer in layers:
        x, k = _block(layer, x, config.n_head)
        kept.append(k)
    final, kept_f = _layernorm(x, w["ln_f.weight"], w["ln_f.bias"])
    p = (final @ w["wte.weight"].T).softmax(-1)
    chosen = p.gather(-1, targets[..., None])
    loss = -chosen.log().mean().item()

    d = p.scatter_add(-1, targets[..., None], torch.full_like(chosen, -1.0)) / targets.numel()
    d, head, _ = _matmul_backward(d, final, w["wte.weight"])
    d, ln_weight, ln_bias = _layernorm_backward(d, kept_f)
    g = {"ln_f.weight": ln_weight, "ln_f.bias": ln_bias}
    for i in reversed(range(config.n_layer)):
        d, of_layer = _block_backward(layers[i], d, kept[i])
        g |= {f"h.{i}.{n}": t for n, t in of_layer.items()}
    g["wte.weight"] = head.index_add(0, tokens.flatten(), d.flatten(0, 1))
    g["wpe.weight"] = torch.zeros_like(w["wpe.weight"])
    g["wpe.weight"][: tokens.size(1)] = d.sum(0)
    return loss, g
