"""The serial run that every plan is compared with: plain PyTorch, on sizes chosen to be awkward.

Mean cross-entropy, torch's own clipping and optimizers: no code is shared with the trainer, so that a mistake there is
found. The sizes are 7 rows, 37 tokens, sequences of 11, layers that do not divide by stages, targets missing unevenly.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
import torch.nn.functional as F

from .corpus.batches import IGNORED, Batch
from .emulate import torchs_optimizer
from .experts.mixture import Experts, set_total
from .machine.arguments import checked
from .machine.patience import patiently
from .model import GPT2, GPT2Config, Noise
from .train import Recipe

CONFIG = GPT2Config(vocab_size=37, n_positions=16, n_layer=5, n_head=4, n_embd=24)
EXPERTS = replace(CONFIG, experts=Experts(8, every=2, capacity=1.5, z=1e-3, shared=1))  # where a plan says ep
LOAD = lambda name: name.endswith("router.bias")  # the names of what balances experts and is no weight
STEPS = 5
# The key bias has no gradient in exact arithmetic; with a tiny eps Adam would enlarge its rounding error.
RECIPES = (Recipe("sgd", lr=0.1, clip=0.5), Recipe("adamw", lr=1e-2, eps=1e-6, clip=0.5))
# How deep a comparison goes beyond losses, gradients and their norm: recipes of training, each with its updates.
MUON = Recipe("muon", lr=1e-2, eps=1e-6, clip=0.5)
DEPTHS = {
    "gradients": (),
    "steps": ((RECIPES[1], 2),),  # a second update meets stale weights and lost moments
    "full": tuple((recipe, STEPS) for recipe in RECIPES),
    "muon": ((MUON, 3),),
}


@checked(rows=(1, 10**6), length=(1, 10**6))
def example_batch(config: GPT2Config, rows: int, length: int, seed: int = 1) -> Batch:
    """A batch of random tokens in which the rows have unequally many targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (rows, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(rows):
        targets[row, length - row % length // 2 :] = IGNORED
    total = int((targets != IGNORED).sum())
    return Batch(tokens[:, :-1], targets, torch.arange(length), torch.arange(rows), total)


@checked()
def example_weights(config: GPT2Config) -> dict[str, torch.Tensor]:
    """Weights far from initialisation, biases and norms included, so that nothing hides behind a zero or a one."""
    generator = torch.Generator().manual_seed(2)
    model = GPT2(config).double()
    noise = lambda p: torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return {n: p.detach() + 0.2 * noise(p) for n, p in model.named_parameters()}


@dataclass(frozen=True)
class Serial:
    """What the serial model computes: tensors by parameter name; weights after the steps of each recipe."""

    initial: dict[str, torch.Tensor]
    losses: dict[str, torch.Tensor]  # of training, of evaluation, and of evaluation after each recipe
    gradients: dict[str, torch.Tensor]
    norm: torch.Tensor
    after: list[dict[str, torch.Tensor]]


@contextmanager
def default_dtype(dtype: torch.dtype):
    """Inside, torch's default dtype is this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.enable_grad()
@default_dtype(torch.float64)
def serial_run(config: GPT2Config, rows: int, length: int, depth: str = "full") -> Serial:
    """What `compare` holds a plan against, in plain PyTorch and float64; `depth` is one of DEPTHS."""
    batch, start = example_batch(config, rows, length), example_weights(config)
    model = serial_model(config, start)
    loss, gradients, norm = serial_gradients(model, batch)
    losses, after = {"training": loss, "evaluation": serial_loss(model, batch)}, []
    for recipe, steps in DEPTHS[depth]:
        model = serial_model(config, start)
        after.append(serial_steps(model, batch, recipe, steps))
        losses[f"evaluation {after_steps(recipe, steps)}"] = serial_loss(model, batch)
    return Serial(serial_start(config), losses, gradients, norm, after)


def after_steps(recipe: Recipe, steps: int) -> str:
    """When the weights of a recipe are compared, in words."""
    return f"after {steps} {recipe.optimizer} steps"


def serial_start(config: GPT2Config) -> dict[str, torch.Tensor]:
    """The weights that a fresh model begins with, by name."""
    return {n: p.detach() for n, p in GPT2(config).double().named_parameters()}


def serial_model(config: GPT2Config, weights: dict) -> GPT2:
    """A serial model in float64 that holds these weights."""
    model = GPT2(config).double()
    model.load_state_dict(weights)
    return model


def serial_gradients(model: GPT2, batch: Batch, step: int = 0):
    """Loss, gradients by name and their norm, in plain PyTorch on the whole batch at once."""
    model.zero_grad()
    noise = Noise(0, step, batch.samples) if model.config.draws else None
    set_total(model, batch.total)
    logits = model(batch.tokens, noise=noise)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for n, p in model.named_parameters() if not LOAD(n)])
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}, norm


@torch.no_grad()
def serial_loss(model: GPT2, batch: Batch) -> torch.Tensor:
    """The mean loss in evaluation, without dropout, in plain PyTorch on the whole batch at once."""
    logits = model(batch.tokens)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)


def serial_steps(model: GPT2, batch: Batch, recipe: Recipe, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """The weights after so many updates, in plain PyTorch: clip_grad_norm_, then torch's SGD, AdamW or Muon."""
    loads = [p for n, p in model.named_parameters() if LOAD(n)]
    weights = [p for n, p in model.named_parameters() if not LOAD(n)]
    hidden = [p for n, p in model.named_parameters() if n.startswith("h.") and p.dim() == 2]
    hidden = hidden if recipe.optimizer == "muon" else []
    optimizer = torchs_optimizer([p for p in weights if not any(p is h for h in hidden)], recipe)
    how = {"lr": recipe.lr, "weight_decay": recipe.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    of_hidden = torch.optim.Muon(hidden, **how) if hidden else None
    for step in patiently(range(steps), f"{recipe.optimizer} updates of the serial run"):
        serial_gradients(model, batch, step)
        torch.nn.utils.clip_grad_norm_(weights, recipe.clip)
        optimizer.step()
        if of_hidden:
            with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):  # its iterations in 64 bits
                of_hidden.step()
        for p in loads:
            p.data -= model.config.experts.speed * p.grad.sign()
    return {n: p.detach() for n, p in model.named_parameters()}
