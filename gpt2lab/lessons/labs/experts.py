"""Small mixtures trained on letters of Shakespeare: how the load of the experts moves, and what a mixture buys."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from ...corpus.batches import Batches
from ...corpus.shards import plays
from ...experts.mixture import Experts, mixtures
from ...model import GPT2, GPT2Config
from ...plan import Plan, build
from ...ranks.mesh import Mesh
from ...train import Recipe, Trainer

LETTERS = GPT2Config(vocab_size=128, n_positions=64, n_layer=2, n_head=2, n_embd=32)


@dataclass(frozen=True)
class History:
    """A training run: loss of each step, each expert's share of the choices (steps, E), and the trained model."""

    losses: list[float]
    shares: np.ndarray
    model: GPT2


def letters(count: int = 200_000) -> np.ndarray:
    """The first letters of the plays as numbers below 128."""
    return np.frombuffer(plays()[:count].encode("ascii", "replace"), np.uint8)


def train(experts: Experts | None, steps: int = 200, lr: float = 3e-3, rows: int = 8, **sizes) -> History:
    """Train a model with these experts (None: dense MLPs) and watch the last layer's load."""
    config = replace(LETTERS, experts=experts, **sizes)
    parallel = build(Plan(), config, Mesh(alone=True))
    trainer, batches = (
        Trainer(parallel, Recipe(lr=lr, warmup=5)),
        Batches(letters(), rows, config.n_positions),
    )
    losses, shares = [], []
    for step in range(steps):
        losses.append(trainer.step(batches.at(step)).loss)
        for mixture in mixtures(parallel.model)[-1:]:
            shares.append((mixture.chosen / mixture.chosen.sum()).tolist())
    return History(losses, np.array(shares), parallel.model)


@torch.no_grad()
def first_experts(model: GPT2, text: str) -> list[int]:
    """The expert that each letter of a text asks for first, in the last layer with experts."""
    seen = []
    mixture = mixtures(model)[-1]
    hook = mixture.register_forward_pre_hook(lambda m, given: seen.append(m.route(given[0])[2][0, :, 0]))
    model(torch.tensor([list(text.encode("ascii"))]))
    hook.remove()
    return seen[0].tolist()
