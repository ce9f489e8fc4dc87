"""Programs of lesson 15: strategies applied in another order, five planted bugs, timed steps."""

import math
from functools import partial
from unittest.mock import patch

import torch

from ... import verify as checks
from ...model import GPT2, GPT2Config
from ...parallel import accumulate, data, finish, sequence, tensor
from ...parallel.context import exchanges
from ...parallel.pipeline import engine, step
from ...parallel.spec import of
from ...plan import Parallel
from ...ranks import comm, paced
from ...ranks.mesh import Mesh
from ...reference import example_batch
from ...train import Trainer
from .instruments import least_seconds, trainer_by

MODEL = GPT2Config(vocab_size=512, n_positions=128, n_layer=4, n_head=4, n_embd=64)
"""The proportions of GPT-2 124M on 8,192 tokens, only smaller."""


def trainer_of(text: str, rows: int = 8) -> tuple[Trainer, object]:
    """A trainer of MODEL by a plan, and a batch for it."""
    return trainer_by(text, MODEL, dtype=torch.float32), example_batch(MODEL, rows, 128)


def timed(rank: int, world_size: int, text: str, links=(None,), threads: int = 1, rows: int = 8) -> tuple:
    """Seconds of a step on each of these links (None: free), the faster of two, and the loss of the last one."""
    torch.set_num_threads(threads)
    trainer, batch = trainer_of(text, rows)
    losses = [trainer.step(batch).loss]  # warm up

    def step(link):
        with paced.use(link):
            losses.append(trainer.step(batch).loss)

    return least_seconds([partial(step, link) for link in links], 2), losses[-1]


def planted(rank: int, world_size: int, bug, job, *args):
    """`job` with a bug (owner, name, make the wrong one from the right one), or with none."""
    owner, name, make = bug or (checks, "TOLERANCE", lambda right: right)
    with patch.object(owner, name, make(getattr(owner, name))):
        return job(rank, world_size, *args)


def _data(model, mesh, plan):
    return data.apply_data(model, mesh["dp", "cp"], plan)


P, T, S = engine.apply_pipeline, tensor.apply_tensor, sequence.apply_sequence
C, D = exchanges.apply_context, _data
"""What edits a model: pipeline, tensor, sequence, context, data."""


def build_in(order):
    """The bug "strategies are applied in this order", for `planted`."""

    def build(plan, config, mesh, dtype, seed=0, device="cpu"):
        model = GPT2(config, seed).to(device, dtype)
        wanted = {P: plan.pp > 1, T: plan.tp > 1, S: plan.sp, C: plan.cp > 1, D: True}
        made = {apply: apply(model, mesh, plan) for apply in order if wanted[apply]}
        specs = {name: of(p) for name, p in model.named_parameters()}
        runs = made.get(P) or accumulate.Accumulate(model)
        return Parallel(plan, mesh, model, runs, made[D], specs, made.get(C))

    return checks, "build", lambda right: build


FINISH = {
    "replicas": lambda lab: lab.sync.finish(),
    "partial": lambda lab: finish.sum_partial(lab.sync.pieces, lab.mesh),
    "tied": lambda lab: lab.engine.tie(lab.sync.pieces, lab.mesh),
    "norm": lambda lab: finish.gradient_norm(lab.sync.pieces, lab.mesh),
}
"""What finishes a step's gradients, by name."""


def _everything_counts(right):
    square = lambda held: sum(p.tensor.grad.pow(2).sum() for p in held)
    return lambda held, mesh, *_: comm.all_reduce(square(held), mesh["tp"]).sqrt().item()


def _clip_first(right):
    def clipped(self):
        own = sum(p.tensor.grad.pow(2).sum() for p in self.pieces).sqrt().item()
        finish.clip(self.pieces, own, 1.0)
        right(self)

    return clipped


def _halved_at_the_border(right):
    return lambda self, op, grad: right(self, op, None if grad is None else grad / 2)


def _without_context(right):
    return lambda self, names: right(self, "dp" if names == ("dp", "cp") else names)


BUGS = {
    "norm counts replicas twice": ("dp=2,tp=2", finish, "gradient_norm", _everything_counts),
    "clipped before the sum": ("dp=2,tp=2,data=naive", data.Naive, "finish", _clip_first),
    "tied gradient not summed": ("pp=2,dp=2,micro=2", engine.Pipeline, "tie", lambda tie: lambda *_: None),
    "divided by the stages": ("pp=2,dp=2,micro=2", step.PipelineStep, "_send_back", _halved_at_the_border),
    "summed over dp, not dp+cp": ("dp=2,cp=2", Mesh, "__getitem__", _without_context),
}
"""Five bugs: title, the plan on which each shows, and what `planted` needs."""


def slow_bytes(order, sizes: dict[str, int], sent: dict[str, float], node: int) -> float:
    """Bytes between nodes of `node` ranks: each rank sends sent[axis] to the next one on the ring of each axis."""
    grid = torch.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in order])
    crossing = lambda place: int((grid // node != grid.roll(-1, place) // node).sum())
    return sum(sent[axis] * crossing(place) for place, axis in enumerate(order))
