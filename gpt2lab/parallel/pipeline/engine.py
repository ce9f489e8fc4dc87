"""Pipeline parallelism: the layers are cut into stages on several ranks, through which micro-batches pass.

One engine runs any schedule of `gpt2lab.schedules`: the schedule says what a rank does next, the engine does it.

Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream".
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import torch

from ...ranks import paced
from ...ranks.mesh import Mesh
from ...schedules import Cost, Schedule, make
from ...schedules import check as check_schedule
from ...schedules.registry import find
from ..base import Engine
from ..finish import summed
from .mailbox import buffers_needed
from .stages import MOST_STAGES, keep_parts, mark_ties, parts_of, sharers
from .step import PipelineStep


class Pipeline(Engine):
    """The engine of a rank that holds some stages of the model.

    Forward: receive x (b, T, C) from the rank before, run the stage, send its output on. Backward: receive
    the output's gradient, run the stage's backward, send the input's gradient back. Afterwards parameters
    that two ranks hold are summed: both ends of the tied embedding, both copies of a bidirectional one. Bytes
    per rank: b T C numbers for every micro-batch, every border to another rank and each direction.
    """

    def __init__(self, model, mesh: Mesh, schedule: Schedule):
        self.model, self.axis, self.schedule = model, mesh["pp"], check_schedule(schedule)
        self.parts = parts_of(schedule, self.axis.rank, model.config)
        keep_parts(model, self.parts)
        self.shared = mark_ties(model, schedule, self.axis.rank)
        same, pipelines = sharers(schedule), mesh.lines(["pp"])
        self.twins = mesh.axis("tie", [[p[r] for r in line] for p in pipelines for line in same], own=True)
        self.buffers = buffers_needed(schedule)
        self.lengths = None  # of the token slices (TeraPipe), where they are not even
        self._pace = None
        self.keep_inputs_only = False  # True: keep a stage's input alone, run its forward again in backward
        self.held: list[int] = []  # how many micro-batches' activations were held after each operation
        self.waiting: list[int] = []  # and how many of them waited for their weight gradient alone

    @property
    def pace(self) -> Cost | None:
        """Times in seconds: operations sleep until their time is over, and messages take the hop's latency."""
        return self._pace

    @pace.setter
    def pace(self, cost: Cost | None) -> None:
        """Raise ValueError for blocking sends or joint blocks, which live ranks cannot pace."""
        for name in ("blocking", "joint"):
            if cost is not None and getattr(cost, name) not in (None, False):
                raise ValueError(
                    f"{name}={getattr(cost, name)} is only simulated: live ranks cannot pace it. Leave it out."
                )
        self._pace = cost

    def run(self, micros, key, sync) -> torch.Tensor:
        """Forward and backward of all micro-batches, in the schedule's order; this rank's part of the loss."""
        step = PipelineStep(self, self.schedule, micros, key)
        order = self.schedule.orders[self.axis.rank]
        last = max((n for n, op in enumerate(order) if op.kind in "BW"), default=-1)
        self.held.clear()
        self.waiting.clear()
        with self._hops():
            for n, op in enumerate(order):
                if n == last:
                    sync.last_micro()
                step.run(op)
                self.held.append(len(step.held))
                self.waiting.append(step.waiting)
            step.mailbox.finish()
        return step.loss

    def _hops(self):
        """The latency of a paced run's messages, as a context."""
        hop = self.pace.hop if self.pace else 0
        return paced.use(paced.Link(float(hop), math.inf)) if hop else nullcontext()

    @torch.no_grad()
    def evaluate(self, micros) -> torch.Tensor:
        """This rank's part of the loss, forward only."""
        step = PipelineStep(self, self.schedule.forward_only, micros, None)
        for op in step.schedule.orders[self.axis.rank]:
            step.run(op)
        step.mailbox.finish()
        return step.loss

    def tie(self, pieces, mesh: Mesh) -> None:
        """Sum the gradients of the parameters that another rank holds too, in one message."""
        tensors = [piece.tensor for piece in pieces if piece.name in self.shared]
        if self.twins is not None and tensors:
            for tensor, total in zip(tensors, summed([t.grad for t in tensors], self.twins), strict=True):
                tensor.grad = total


def schedule_of(plan) -> Schedule:
    """The schedule that a plan names; `chunks` is model chunks a rank, or token slices for terapipe."""
    said = {"chunks": plan.chunks, "slices": plan.chunks, "active": plan.active or None}
    options = {name: said[name] for name in find(plan.schedule).options}
    return make(plan.schedule, plan.pp, plan.micro, **options)


def apply_pipeline(model, mesh: Mesh, plan) -> Pipeline:
    """Keep this rank's stages of the model, in place; returns the engine that runs the plan's schedule."""
    engine = Pipeline(model, mesh, schedule_of(plan))
    engine.keep_inputs_only = plan.recompute
    return engine


def check(config, plan, rows: int, length: int) -> None:
    """Raise ValueError, before any process starts, where the plan's pipeline cannot run this model."""
    options, stages = find(plan.schedule).options, plan.pp * plan.chunks
    if "chunks" in options and stages > MOST_STAGES:  # before a schedule of so many is made
        said = f"pp={plan.pp} x chunks={plan.chunks}"
        raise ValueError(f"{said} = {stages:,} stages are too many. Use at most {MOST_STAGES:,}.")
    if "slices" in options and plan.chunks > length:
        said = f"{length} tokens make no {plan.chunks} slices"
        raise ValueError(f"Sequences of {said}. Use at most chunks={length}.")
    most = config.n_layer + 2  # each rank has a layer, the embedding or the head
    words = {name: getattr(plan, name) for name in ("pp", "micro", "schedule", "chunks", "active")}
    schedule = _sound(type(plan)(**words)) if plan.pp <= most else None
    if empty := _empty(schedule, config) if schedule else [most]:
        fewer = range(1, min(plan.pp, config.n_layer + 3))
        fits = [str(n) for n in fewer if _fits(config, replace(plan, pp=n))]
        raise ValueError(
            f"{config.n_layer} layers, the embedding and the head leave nothing for rank {empty[0]} of pp={plan.pp}. "
            f"Use pp={', '.join(fits)}, or another schedule or fewer chunks."
        )
    bare = [i for i, layers in enumerate(parts_of(schedule, 0, config).layers) if not layers]
    if plan.sp and bare:
        raise ValueError(
            f"sp=true needs a layer on every stage, but {config.n_layer} layers leave stage {bare[0]} of "
            f"{schedule.depth} without. Use fewer stages, or sp=false."
        )
    if schedule.slices > 1:
        if plan.cp > 1 or plan.sp:
            raise ValueError(
                "schedule=terapipe already splits the tokens of a sequence. Leave cp and sp out, or use another "
                "schedule."
            )
        if plan.zero == 3:
            raise ValueError(
                "zero=3 runs every block a second time in backward, and schedule=terapipe keeps the keys and values of "
                "the first time. Use zero=1 or 2, or another schedule."
            )


@lru_cache(maxsize=64)
def _sound(plan) -> Schedule:
    return check_schedule(schedule_of(plan))


def _empty(schedule: Schedule, config) -> list[int]:
    """The ranks of a pipeline that would hold no part of the model."""
    parts = [parts_of(schedule, rank, config) for rank in range(schedule.ranks)]
    return [rank for rank, p in enumerate(parts) if not (p.first or p.last or p.blocks)]


def _fits(config, plan) -> bool:
    """Whether a plan's schedule exists and gives every rank something."""
    try:
        return plan.pp == 1 or not _empty(schedule_of(plan), config)
    except ValueError:
        return False
