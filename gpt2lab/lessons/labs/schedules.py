"""What lesson 08 runs beside its own code: every schedule on live ranks, slices of a sequence, GEMS, planted bugs."""

import torch

from ...model import GPT2, GPT2Config
from ...parallel.accumulate import Alone
from ...parallel.pipeline import step
from ...parallel.pipeline.engine import Pipeline
from ...parallel.pipeline.mailbox import Mailbox
from ...ranks import comm, trace
from ...ranks.mesh import Mesh
from ...reference import example_batch, serial_gradients
from ...schedules import Cost, Op, Schedule, make, simulate
from .instruments import apart, begin, bytes_sent

SMALL = GPT2Config(vocab_size=64, n_positions=64, n_layer=8, n_head=2, n_embd=32)


def gems(ranks: int, micros: int) -> Schedule:
    """Two copies in opposite directions and one micro-batch after the other (Jain et al. 2020, "GEMS").

    A forward in one direction follows right behind the backward in the other. Bubble (p - 1)/(p + 1/2) for a backward
    of two forwards, as m grows; one activation.
    """
    orders = [
        [Op(kind, 2 * ranks - 1 - rank if i % 2 else rank, i) for i in range(micros) for kind in "FB"]
        for rank in range(ranks)
    ]
    placement = (*range(ranks), *reversed(range(ranks)))
    return Schedule(tuple(map(tuple, orders)), placement, micros, 2, name="gems", promise=(1,) * ranks)


def both_ways(ranks: int = 4, micros: int = 4) -> list[tuple]:
    """Rows of schedules (TB = 2 TF): name, bubble simulated, by formula, weights, activations on the fullest rank."""
    p, m = ranks, micros
    formulas = {
        "gpipe": (p - 1) / (m + p - 1),
        "1f1b": (p - 1) / (m + p - 1),
        "gems": 1 - 3 * m / (m * (2 * p + 1) + p - 1),
        "chimera": (p - 2) / (1.5 * m + p - 2),
    }
    rows = []
    for name, formula in formulas.items():
        schedule = gems(p, m) if name == "gems" else make(name, p, m)
        t = simulate(schedule, Cost(1, backward=2))
        most = max(float(schedule.activations(r)) for r in range(p))
        rows.append((name, f"{float(t.bubble):.1%}", f"{formula:.1%}", int(schedule.weights(0)), most))
    return rows


def summed(model, engine) -> dict[str, torch.Tensor]:
    """This rank's gradients by name, once what two ranks hold is summed."""
    for p in [p for n, p in model.named_parameters() if n in engine.shared]:
        p.grad = comm.all_reduce(p.grad, engine.twins)
    return {n: p.grad for n, p in model.named_parameters()}


def live(rank: int, world_size: int, schedules: list[Schedule]):
    """Run each schedule; returns the most that was held, the most that waited for W, messages and bytes that left for
    other stages, bytes of the sums of what two ranks hold, the largest gradient error, and the gradients.
    """
    mesh, batch, found = Mesh(pp=world_size), example_batch(SMALL, rows=8, length=16), []
    _, want, _ = serial_gradients(GPT2(SMALL).double(), batch)
    for schedule in schedules:
        micros = batch.micro(schedule.micros)
        model = GPT2(SMALL).double()
        engine = Pipeline(model, mesh, schedule)
        comm.clear_log()
        engine.run(micros, None, Alone())
        _, size, count = comm.traffic().get(("send", "pp"), (0, 0, 0))
        grads = summed(model, engine)
        sums = bytes_sent() - size
        found.append((max(engine.held), max(engine.waiting), count, size, sums, apart(grads, want), grads))
    return found


def sliced(rank: int, world_size: int, lengths: tuple[int, ...], cost: Cost):
    """One sequence in slices of these lengths: the largest gradient error, and the spans of a paced run."""
    mesh, batch, model = Mesh(pp=world_size), example_batch(SMALL, 1, sum(lengths)), GPT2(SMALL).double()
    _, want, _ = serial_gradients(GPT2(SMALL).double(), batch)
    engine = Pipeline(model, mesh, make("terapipe", world_size, 1, slices=len(lengths)))
    engine.lengths = lengths
    engine.run(batch.micro(1), None, Alone())
    error = apart(summed(model, engine), want)
    begin(mesh.world)
    engine.pace = cost
    engine.run(batch.micro(1), None, Alone())
    return error, [s for s in trace.spans() if s.kind in ("forward", "backward")]


def _through(self, op, x, right=step.PipelineStep._through):
    """The first stage takes the micro-batch after its own."""
    here, self.units = self.units, [self.units[-1], *self.units[:-1]]
    try:
        return right(self, op, x) if op.stage else right(self, op._replace(micro=(op.micro + 1) % 4), x)
    finally:
        self.units = here


def _weight_gradient(self, op, right=step.PipelineStep.weight_gradient):
    return self.held.pop((op.stage, op.micro)) if op.micro == 3 else right(self, op)


def _take(self, op, right=Mailbox.take):
    """The gradients of micro-batches 2 and 3, which have the same size, change places."""
    swap = {2: 3, 3: 2}.get(op.micro, op.micro)
    return right(self, op._replace(micro=swap) if op.kind == "I" and op in self.source else op)


BUGS = {
    "tied gradient lost": (Pipeline, "tie", lambda self, pieces, mesh: None, "1f1b"),
    "wrong micro-batch": (step.PipelineStep, "_through", _through, "1f1b"),
    "weight gradient dropped": (step.PipelineStep, "weight_gradient", _weight_gradient, "zb_h1"),
    "gradients in another order": (Mailbox, "take", _take, "gpipe"),
}
"""Bugs of real pipelines: where they stand, what stands there instead, and a schedule that shows them."""
