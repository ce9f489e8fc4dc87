"""What lesson 14 runs beside its own code: dimensions of an MLP and a block by name, a step of AdamW."""

import torch

from ...emulate import torchs_optimizer
from ...reference import example_batch, example_weights, serial_gradients, serial_model

MLP = {
    "x": ("batch", "seq", "embd"),
    "grad y": ("batch", "seq", "embd"),
    "c_fc.weight": ("ff", "embd"),
    "c_fc.bias": ("ff",),
    "c_proj.weight": ("embd", "ff"),
    "c_proj.bias": ("embd",),
    "hidden": ("batch", "seq", "ff"),
}

BLOCK = {
    **{name: MLP[name] for name in ("x", "grad y", "hidden")},
    **{f"mlp.{name}": dims for name, dims in MLP.items() if name.startswith("c_")},
    **{f"{norm}.{kind}": ("embd",) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")},
    "attn.c_attn.weight": ("qkv", "heads", "width", "embd"),
    "attn.c_attn.bias": ("qkv", "heads", "width"),
    "attn.c_proj.weight": ("embd", "heads", "width"),
    "attn.c_proj.bias": ("embd",),
    "queries": ("batch", "heads", "seq", "width"),
    "scores": ("batch", "heads", "seq", "keys"),
}


def adamw_step(config, rows: int, length: int, recipe) -> tuple[dict, dict]:
    """Inputs and results of a captured step from empty moments: loss, norm, weights, moments by plain PyTorch."""
    batch, weights = example_batch(config, rows, length), example_weights(config)
    model = serial_model(config, weights)
    loss, _, norm = serial_gradients(model, batch)
    named = dict(model.named_parameters())
    torch.nn.utils.clip_grad_norm_(named.values(), recipe.clip)
    adamw = torchs_optimizer(list(named.values()), recipe)
    adamw.step()
    scalars = {"total": torch.tensor(float(batch.total)).double(), "step": torch.ones(()).double()}
    given = {**weights, "tokens": batch.tokens, "targets": batch.targets, **scalars}
    want = {"loss": loss, "norm": norm} | {f"new {n}": p.detach() for n, p in named.items()}
    for kind, moment in (("m", "exp_avg"), ("v", "exp_avg_sq")):
        given |= {f"{kind} {n}": torch.zeros_like(p) for n, p in weights.items()}
        want |= {f"new {kind} {n}": adamw.state[p][moment] for n, p in named.items()}
    return given, want
