"""One step of a pipeline on one rank: its operations, and what it holds between a forward and its backward."""

import time
from contextlib import contextmanager, nullcontext

import torch

from ...model import Noise
from ...ranks import trace
from ...schedules import Op, Schedule
from .mailbox import Mailbox
from .split_backward import Work, noting
from .token_slices import SliceCache, cut_columns

SPANS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


class PipelineStep:
    """A step in progress. `engine` is the rank's Pipeline; `key` is (seed, step) for dropout, or None.

    Raises ValueError where the schedule is for another number of micro-batches.
    """

    def __init__(self, engine, schedule: Schedule, micros, key):
        if len(micros) != schedule.micros:
            raise ValueError(
                f"This step has {len(micros)} micro-batches, but its schedule is for {schedule.micros}. "
                f"Use micro={len(micros)} in the plan."
            )
        self.engine, self.schedule, self.model, self.key = engine, schedule, engine.model, key
        self.units = list(micros)
        if schedule.slices > 1:
            self.units = [u for m in micros for u in cut_columns(m, schedule.slices, engine.lengths)]
        self.number = next(self.model.parameters()).detach().new_zeros(())
        inputs = self.units, self.model, self.number  # no `self`: in a circle what is sent outlives the step
        self.mailbox = Mailbox(schedule, engine.axis, lambda op: _shaped(op, *inputs), engine.buffers)
        # by (stage, unit), until its backward: the graph, or the stage's input alone
        self.held: dict[tuple[int, int], Work | torch.Tensor | None] = {}
        self.waiting = 0  # of those held, how many are between the halves of their backward
        self.late: dict[tuple[int, int], torch.Tensor | None] = {}  # gradients that wait for a whole backward
        self.split = {(op.stage, op.micro) for op in schedule.orders[engine.axis.rank] if op.kind == "W"}
        self.parameters = list(self.model.parameters()) if self.split else []
        self.caches: dict[tuple[int, int], SliceCache] = {}
        self.loss = self.number.double()  # in 16 bits a sum of many parts stops growing

    def run(self, op: Op) -> None:
        """Run one operation of the schedule."""
        kinds = {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}
        kinds[op.kind](op)

    def forward(self, op: Op) -> None:
        """Run a micro-batch through a stage, keep what its backward will need, and send the output on."""
        x = self.mailbox.take(op) if self.schedule.position(op.stage) else None
        with self._timed(op):
            if self.engine.keep_inputs_only:
                with torch.no_grad():
                    output, kept = self._through(op, x).output, x
            else:
                kept = self._through(op, x)
                output = kept.output
        if torch.is_grad_enabled():
            self.held[op.stage, op.micro] = kept
        else:
            self._forget(op)
        if self._last(op):
            self.loss += output.detach()
        else:
            self.mailbox.give(op, output.detach())

    def backward(self, op: Op) -> None:
        """Run the whole backward of a micro-batch through a stage and send the gradient of its input back."""
        grad = None if self._last(op) else self.mailbox.take(op._replace(kind="I"))
        with self._timed(op):
            grad = self._recall(op).backward(grad)
        del self.held[op.stage, op.micro]
        self._forget(op)
        self._send_back(op, grad)

    def input_gradient(self, op: Op) -> None:
        """Run the half of the backward that the stage before waits for; on the first stage a no-op."""
        grad, unit = None if self._last(op) else self.mailbox.take(op), (op.stage, op.micro)
        with self._timed(op):
            if self.schedule.position(op.stage):
                self.held[unit] = self._recall(op)
                grad = self.held[unit].input_gradient(grad)
            else:
                self.late[unit] = grad
        self.waiting += 1
        self._send_back(op, grad)

    def weight_gradient(self, op: Op) -> None:
        """Run the other half, which no rank waits for; on the first stage the whole backward."""
        unit = op.stage, op.micro
        with self._timed(op):
            if unit in self.late:
                self._recall(op).backward(self.late.pop(unit))
            else:
                self.held[unit].weight_gradient()
        del self.held[unit]
        self.waiting -= 1

    def _through(self, op: Op, x: torch.Tensor | None) -> Work:
        """The stage's forward on x (b, t, C), or on the tokens; returns (b, t, C), or a part of the loss."""
        unit, model, position = self.units[op.micro], self.model, self.schedule.position(op.stage)
        noise = None if self.key is None else Noise(*self.key, unit.samples)
        before = model.embed(unit.tokens, unit.positions, noise) if position == 0 else None
        x = (x if before is None else before).detach().requires_grad_(torch.is_grad_enabled())
        cache, y = self._cache(op), x
        split = position and (op.stage, op.micro) in self.split
        with noting() if split else nullcontext(()) as linears:
            for layer in self.engine.parts.layers[position]:
                y = model.run_block(model.h[str(layer)], y, unit.positions, noise, cache)
            if self._last(op):
                y = model.loss(model.head(y), unit.targets) / unit.total
        return Work(x, y, before, cache.take_made() if cache else (), linears, self.parameters)

    def _recall(self, op: Op) -> Work:
        """The graph of the forward; if only the input was kept, the forward runs again."""
        kept = self.held[op.stage, op.micro]
        return kept if isinstance(kept, Work) else self._through(op, kept)

    def _send_back(self, op: Op, grad: torch.Tensor) -> None:
        if self.schedule.position(op.stage):
            self.mailbox.give(op, grad)

    def _last(self, op: Op) -> bool:
        return self.schedule.position(op.stage) == self.schedule.depth - 1

    def _cache(self, op: Op) -> SliceCache | None:
        """The earlier slices' keys and values, where micro-batches are cut into token slices."""
        if self.schedule.slices == 1:
            return None
        micro, at = divmod(op.micro, self.schedule.slices)
        cache = self.caches.setdefault((op.stage, micro), SliceCache())
        cache.at = at
        return cache

    def _forget(self, op: Op) -> None:
        """Drop the keys and values of a micro-batch after the first slice's backward, or a last forward alone."""
        at = op.micro % self.schedule.slices
        if at == (self.schedule.slices - 1 if op.kind == "F" else 0):
            self.caches.pop((op.stage, op.micro // self.schedule.slices), None)

    @contextmanager
    def _timed(self, op: Op):
        """Record the operation as a span; in a paced run also sleep until its set time is over."""
        pace = self.engine.pace
        with trace.span(f"{op.kind}{op.micro}", kind=SPANS[op.kind]):
            start = time.perf_counter()
            yield
            if pace is not None:
                end = start + pace.time(op.kind, self.schedule.position(op.stage), op.micro)
                time.sleep(max(0.0, end - time.perf_counter()))


def _shaped(op: Op, units: list, model, number: torch.Tensor) -> torch.Tensor:
    """A tensor, without memory of its own, of the shape of a stage's input (b, t, C)."""
    rows, columns = units[op.micro].tokens.shape
    return number.expand(rows, model.tokens_here(columns), model.config.n_embd)
