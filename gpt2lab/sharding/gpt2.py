"""One training step of GPT-2 as a graph: the package's own model, forward, loss, backward, norm, clip and update."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..machine.arguments import checked
from ..model import GPT2, GPT2Config
from .capture import capture
from .graph import Graph


def plain_attention(q, k, v, positions, window=None):
    """Causal attention (B, H, T, D) as two products and a softmax, so that heads, queries and keys can be cut."""
    if window is not None:
        raise ValueError("attention with a window is not captured. Use a GPT2Config with window=None.")
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    return scores.masked_fill(positions[:, None] < positions, float("-inf")).softmax(-1) @ v


@checked()
def captured_module(module: torch.nn.Module, x: torch.Tensor, names: dict, others: Callable = tuple) -> Graph:
    """A module's forward and backward as a graph: `y` and, for x and each parameter, `grad NAME`, from `grad y`.

    `names` are those of the dimensions of x and of the parameters; `others()` makes further, constant arguments.
    """
    params = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    given = {"x": x.detach().clone().requires_grad_(), **params}

    def step(*values):
        own = dict(zip(params, values[1:-1], strict=True))
        y = torch.func.functional_call(module, own, (values[0], *others()))
        return y, *torch.autograd.grad(y, values[:-1], values[-1])

    inputs = given | {"grad y": torch.zeros_like(x)}
    return capture(step, inputs, ["y", *(f"grad {n}" for n in given)], names | {"grad y": names["x"]})


@checked(rows=(1, 10**6), length=(1, 10**6))
def captured_gpt2(
    config: GPT2Config, rows: int, length: int, recipe=None, dtype: torch.dtype = torch.float64
) -> Graph:
    """GPT-2 on (rows, length) tokens as a graph: the summed `loss` and, for each parameter, `grad NAME`.

    With a `train.Recipe` it is a whole step: inputs are also `total` (of targets), `step` (from 1) and, for AdamW,
    the moments `m NAME` and `v NAME`; results are the mean `loss`, the gradient's `norm` and `new NAME` of every
    parameter and moment. Aliases are `border 0` and so on for what goes from the embedding to the first attention,
    from there to the MLP, and so on to the head, and `grad border 0`.
    """
    _check(config, length, recipe)
    model, borders = GPT2(config).to(dtype), []
    for block in model.h.values():
        block.attn.core = plain_attention
        for norm in (block.ln_1, block.ln_2):
            norm.register_forward_pre_hook(lambda module, args: borders.append(args[0]))
    model.ln_f.register_forward_pre_hook(lambda module, args: borders.append(args[0]))
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    tokens = torch.zeros(rows, length, dtype=torch.long)
    inputs = {**params, "tokens": tokens, "targets": tokens.clone()}
    names, kinds = list(params), "mv" if recipe and recipe.optimizer == "adamw" else ""
    moments = {f"{kind} {n}": torch.zeros_like(p) for kind in kinds for n, p in params.items()}
    if recipe:
        inputs |= {"total": torch.ones((), dtype=dtype), "step": torch.ones((), dtype=dtype)} | moments

    def run(*values):
        given, borders[:] = dict(zip(inputs, values, strict=True)), []
        weights = {n: given[n] for n in names}
        loss = model.loss(torch.func.functional_call(model, weights, (given["tokens"],)), given["targets"])
        loss = loss / given["total"] if recipe else loss
        grads = torch.autograd.grad(loss, [*weights.values(), *borders])
        grads, ends = list(grads[: len(names)]), [*borders, *grads[len(names) :]]
        if recipe:
            grads = _updated(
                recipe, list(weights.values()), grads, [given[m] for m in moments], given["step"]
            )
        return loss, *grads, *ends

    results = ["norm", *(f"new {n}" for n in (*names, *moments))] if recipe else [f"grad {n}" for n in names]
    ends = [f"{kind}border {n}" for kind in ("", "grad ") for n in range(2 * config.n_layer + 1)]
    dims = {name: dimensions(name) for name in inputs}
    graph = capture(run, inputs, ["loss", *results, *ends], dims)
    return replace(
        graph,
        outputs={n: v for n, v in graph.outputs.items() if n not in ends},
        aliases={n: graph.outputs[n] for n in ends},
    )


def _check(config: GPT2Config, length: int, recipe) -> None:
    """Raise ValueError for what is not captured."""
    if length > config.n_positions:
        raise ValueError(
            f"length = {length} does not fit. Use at most the model's {config.n_positions} positions."
        )
    if not hasattr(recipe, "optimizer") and recipe is not None:
        raise ValueError(
            f"recipe = {recipe!r} is no recipe. Use a train.Recipe, or None for gradients alone."
        )
    if config.dropout:
        raise ValueError("dropout is not captured. Use a GPT2Config with dropout=0.")
    if recipe and (recipe.warmup or recipe.decay_steps or recipe.autocast or recipe.optimizer == "muon"):
        raise ValueError(
            "An update is captured with sgd or adamw, at one rate and in one type. Leave muon, warmup, decay_steps and "
            "autocast out."
        )


DIMENSIONS = {
    "tokens": "batch seq",
    "targets": "batch seq",
    "total": "",
    "step": "",
    "wte.weight": "vocab embd",
    "wpe.weight": "positions embd",
    "c_attn.weight": "qkv heads width embd",
    "c_attn.bias": "qkv heads width",
    "attn.c_proj.weight": "embd heads width",
    "c_fc.weight": "ff embd",
    "c_fc.bias": "ff",
    "mlp.c_proj.weight": "embd ff",
}


@checked()
def dimensions(name: str) -> tuple[str, ...]:
    """The names of the dimensions of GPT-2's inputs; q, k, v and the heads, fused in the weight, are apart."""
    return next((tuple(d.split()) for end, d in DIMENSIONS.items() if name.endswith(end)), ("embd",))


def _updated(recipe, weights, grads, moments, step) -> list:
    """The norm, the new weights and both moments: clipped, then SGD or AdamW with decay of matrices only."""
    first, *others = ((g * g).sum() for g in grads)
    norm = sum(others, first).sqrt()
    if recipe.clip is not None:
        grads = [g * (recipe.clip / (norm + 1e-6)).clamp(max=1.0) for g in grads]
    decay = [1 - recipe.lr * recipe.weight_decay * (w.dim() >= 2) for w in weights]
    if recipe.optimizer == "sgd":
        grads = [
            g + recipe.weight_decay * w if w.dim() >= 2 else g for w, g in zip(weights, grads, strict=True)
        ]
        return [norm, *(w - recipe.lr * g for w, g in zip(weights, grads, strict=True))]
    (a, b), half = recipe.betas, len(weights)
    m = [a * m + (1 - a) * g for m, g in zip(moments[:half], grads, strict=True)]
    v = [b * v + (1 - b) * (g * g) for v, g in zip(moments[half:], grads, strict=True)]
    new = [
        w * d - recipe.lr * (m / (1 - a**step)) / ((v / (1 - b**step)).sqrt() + recipe.eps)
        for w, d, m, v in zip(weights, decay, m, v, strict=True)
    ]
    return [norm, *new, *m, *v]
