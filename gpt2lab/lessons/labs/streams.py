"""What lesson 09 runs beside its own code: streams of batches, planted bugs, counters, mixed gradients."""

import time

import torch

from ...emulate import HEAD, TwoEnds, mixed_gradient
from ...model import GPT2Config
from ...reference import example_batch, example_weights
from ...train import Recipe, Trainer
from .instruments import built, compared_with, in_float64

SMALL = GPT2Config(vocab_size=37, n_positions=16, n_layer=4, n_head=2, n_embd=16)


@in_float64()
def trained(rank, world_size, text: str, count: int, pace=None):
    """Train on `count` batches by a plan: what each operation read, the most activations held, and the seconds.

    A plan with a flush reads nothing but the newest weights, so its record is empty. `pace` stretches operations.
    """
    batches = [example_batch(SMALL, 8, 11, t) for t in range(count)]
    parallel = built(text, SMALL)
    parallel.load(example_weights(SMALL))
    trainer, engine = Trainer(parallel, Recipe("sgd", lr=0.05)), parallel.engine
    streams = parallel.plan.asynchronous
    train = trainer.stream if streams else lambda batches: [trainer.step(b) for b in batches]
    train(batches[:1])
    engine.pace = pace
    start = time.perf_counter()
    train(batches)
    return list(getattr(engine, "record", ())), max(engine.held), time.perf_counter() - start


def compared_with_bug(rank, world_size, owner, name: str, make, text: str):
    """What the comparison with the emulator finds on this rank while `owner.name` is `make(right)`."""
    return compared_with(rank, world_size, (owner, name, make(getattr(owner, name))), text, SMALL, 7, 11)


def gradient_at(forward: dict, backward: dict, batch) -> dict[str, torch.Tensor]:
    """Gradients by name, where forward and backward read these weights (both ends of the embedding in one sum)."""
    ends = [{**weights, HEAD: weights["wte.weight"]} for weights in (forward, backward)]
    _, found = mixed_gradient(TwoEnds(SMALL).double(), *ends, batch.tokens, batch.targets, batch.total)
    return found | {"wte.weight": found["wte.weight"] + found.pop(HEAD)}


def apart(a: dict, b: dict) -> float:
    """The distance of two gradients, relative to the second."""
    norm = lambda grads: torch.stack([g.norm() for g in grads.values()]).norm().item()
    return norm({name: a[name] - b[name] for name in b}) / norm(b)
