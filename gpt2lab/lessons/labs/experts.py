"""Small mixtures trained on letters, and steps on live ranks: wrong habits, messages between machines, a paced step."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from ...corpus.batches import Batches
from ...corpus.shards import plays
from ...experts.mixture import Experts, mixtures
from ...model import GPT2, GPT2Config
from ...parallel import spec
from ...plan import Plan, build
from ...processes.launch import launch
from ...ranks import paced, trace
from ...ranks.mesh import Mesh
from ...reference import EXPERTS, example_batch, example_weights
from ...train import Recipe, Trainer
from .instruments import asleep, begin, built

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


def train(experts: Experts | None, seed: int = 0, steps: int = 200, rows: int = 8) -> History:
    """Train a model with these experts (None: dense MLPs) and watch the last layer's load."""
    config = replace(LETTERS, experts=experts)
    parallel = build(Plan(), config, Mesh(alone=True), seed=seed)
    trainer = Trainer(parallel, Recipe(lr=3e-3, warmup=5))
    batches = Batches(letters(), rows, config.n_positions, seed=seed)
    losses, shares = [], []
    for step in range(steps):
        losses.append(trainer.step(batches.at(step)).loss)
        for mixture in mixtures(parallel.model)[-1:]:
            shares.append((mixture.chosen / mixture.chosen.sum()).tolist())
    return History(losses, np.array(shares), parallel.model)


def train_all(jobs: list[tuple[Experts | None, int]]) -> list[History]:
    """Several runs (experts, seed), shared out between two ranks: each run is serial."""
    parts = launch(_every_second, jobs, ranks=2, echo=False, timeout=120)
    return [parts[i % 2][i // 2] for i in range(len(jobs))]


def _every_second(rank: int, world_size: int, jobs) -> list[History]:
    torch.set_num_threads(1)
    return [train(*job) for job in jobs[rank::world_size]]


# ---- how a skew of the choices spreads


@dataclass(frozen=True)
class Routed:
    """What tokens on ranks ask for: choices (ranks, E) asked and served, and rows (ranks, ranks) from each to each."""

    asked: np.ndarray
    served: np.ndarray
    rows: np.ndarray

    @property
    def dropped(self) -> float:
        """The share of all choices that found no room."""
        return 1 - self.served.sum() / self.asked.sum()


def routed(
    experts: int, top_k: int, capacity: float, skew: float, ranks: int = 4, tokens: int = 256
) -> Routed:
    """Choices drawn by chance, expert e with a weight of 1 / (e + 1)^skew; `tokens` a rank compete for room."""
    router = "switch" if top_k == 1 else "mixtral"
    room = Experts(experts, top_k, router, capacity).room(tokens)
    # The largest of such sums are a choice by weight without replacement.
    chance = np.random.default_rng(0).gumbel(size=(ranks, tokens, experts))
    chosen = (chance - skew * np.log(np.arange(experts) + 1)).argsort(-1)[..., -top_k:]
    asked = (chosen[..., None] == np.arange(experts)).sum((1, 2))
    served = np.minimum(asked, room)
    return Routed(asked, served, served.reshape(ranks, ranks, -1).sum(-1))


# ---- wrong habits


def habits(rank: int, world_size: int) -> dict[str, dict]:
    """Of each way to treat gradients and load losses on two ranks, how far the gradients are from the serial ones."""
    batch, own = example_batch(SMALL, 8, 11), replace(SMALL.experts, group="rank")
    of_a_rank = replace(batch, total=batch.total // world_size)  # the loss: a mean over the rank's tokens
    return {
        "right": gradients_apart(SMALL, batch),
        "averaged": gradients_apart(SMALL, of_a_rank, dense=1 / world_size),
        "divided": gradients_apart(SMALL, batch, experts=1 / world_size),
        "averaged and divided": gradients_apart(
            SMALL, of_a_rank, dense=1 / world_size, experts=1 / world_size
        ),
        "detached": gradients_apart(replace(SMALL, experts=replace(SMALL.experts, balance=0.0)), batch),
        "of each rank": gradients_apart(replace(SMALL, experts=own), batch),
    }


SMALL = replace(EXPERTS, n_layer=2, experts=Experts(8, 2, balance=0.1))


def gradients_apart(
    config: GPT2Config, batch, dense=1.0, experts=1.0, serial="serial", alone_config=SMALL
) -> dict[str, tuple]:
    """By kind of weight: gradients of a step along the serial ones, 1 where they agree, and how far they are off.

    Gradients of the experts, and of all else (`dense`), are multiplied by a factor after the step's sums.
    """
    spread = built("dp=2,ep=2", config)
    alone = build(Plan.parse(serial), alone_config, Mesh(alone=True), torch.float64)
    for parallel, rows in ((spread, batch), (alone, example_batch(SMALL, 8, 11))):
        parallel.load(example_weights(SMALL))
        Trainer(parallel).gradients(rows)
    for piece in spread.sync.pieces:
        piece.tensor.grad *= experts if spec.of(piece.tensor).expert else dense
    right, found = alone.gradients(), {}
    for kind in ("experts", "router", "others"):
        pairs = [(g, right[n]) for n, g in spread.gradients().items() if kind == _kind(n)]
        a, b = (torch.cat([t.flatten() for t in side]) for side in zip(*pairs, strict=True))
        found[kind] = ((a @ b) / (b @ b)).item(), ((a - b).norm() / b.norm()).item()
    return found


def _kind(name: str) -> str:
    return "experts" if ".experts." in name else "router" if ".router." in name else "others"


# ---- messages and time


def slow(x, name: str, seconds: float):
    """x after a set time; its backward takes as long."""
    asleep(name, "forward", seconds)
    x.register_hook(lambda grad: asleep(name, "backward", seconds))
    return x


def beside_shared(rank: int, world_size: int) -> list:
    """Spans of a paced mixture with a shared expert, forward and backward: messages are real, computing sleeps."""
    config = replace(SMALL, n_layer=1, experts=replace(SMALL.experts, shared=1))
    parallel = built(f"dp={world_size},ep={world_size}", config)
    mixture, x = mixtures(parallel.model)[0], torch.randn(4, 16, config.n_embd).double().requires_grad_()
    mixture.shared.register_forward_hook(lambda _, given, y: slow(y, "shared", 0.03))
    grouped = mixture.grouped
    mixture.grouped = lambda *given: slow(grouped(*given), "experts", 0.02)
    begin(parallel.mesh.world)
    with paced.use(paced.Link(0.005, 1e6)):  # 64 rows of 24 numbers to the other rank: about 17 ms
        mixture(x).sum().backward()
    return trace.spans()
