"""Asynchronous pipelines on live ranks: each stage updates by itself and keeps the versions that will be read.

Every operation reads the version of the weights that `gpt2lab.schedules.asynchronous` says.

The tied embedding has one sequence of versions. The first stage owns it: the last one sends its gradient there, and
pulls a version, 2 V C numbers an update in all, when the first micro-batch arrives whose table asks for it. Where these
stages have replicas, a gradient goes to the one that had the micro-batch, and the first one's versions to all.

Gaunt et al. 2017, "AMPNet"; Narayanan et al. 2019, "PipeDream"; Narayanan et al. 2021, "PipeDream-2BW".
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from ...ranks import comm
from ...ranks.mesh import NAMES, Axis, Mesh
from ...schedules import Op, Schedule
from ...schedules.asynchronous import Stream, free_running, make_stream
from ...schedules.registry import find
from .. import spec
from .engine import Pipeline
from .mailbox import buffers_needed
from .step import PipelineStep


class Stash:
    """The versions of a stage's weights: one is in the parameters themselves, the others are kept as copies.

    Autograd raises an error in a backward whose weights were changed in place. Here that is intended, so values are
    written without its notice (`Tensor.data`): a saved graph sees the version in use.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]):
        self.parameters, self.used, self.kept = list(parameters), 0, {}

    @property
    def versions(self) -> frozenset[int]:
        """The versions that are here."""
        return frozenset({self.used, *self.kept})

    @property
    def bytes(self) -> int:
        """Bytes of all versions that are here, counted tensor by tensor."""
        tensors = [*self.parameters, *(value for values in self.kept.values() for value in values)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def use(self, version: int) -> None:
        """Put a version into the parameters, and keep a copy of the one that was there."""
        if version == self.used:
            return
        stored = self.kept.pop(version)
        for p, value in zip(self.parameters, stored, strict=True):
            here = p.data.clone()
            p.data.copy_(value)
            value.copy_(here)
        self.kept[self.used], self.used = stored, version

    def push(self) -> None:
        """Keep a copy of the version in use: the optimizer is about to overwrite it."""
        self.kept[self.used] = [p.data.clone() for p in self.parameters]

    def free(self, wanted: frozenset[int]) -> None:
        """Forget all versions but these."""
        if self.used not in wanted:
            self.use(max(wanted))
        self.kept = {v: values for v, values in self.kept.items() if v in wanted}


class Embedding:
    """The tied embedding of one stream: owned by the first stage, followed by the last, unknown to all others.

    `ends` are the ranks of the first stage, then those of the last. A micro-batch that comes back proves that what was
    sent before it has been read, so no more messages are unread than updates are made while one is under way, and one.
    """

    def __init__(self, weight: torch.Tensor | None, ends: Axis | None, table: Stream):
        self.weight, self.ends, self.version, self.leaving = weight, ends, 0, deque()
        self.first = range(len(table.schedule.ranks_of(0)))
        self.last = range(len(self.first), ends.size if ends is not None else 0)
        self.most = unread(table) * max(1, len(self.last))

    def send(self, value: torch.Tensor, end: int) -> None:
        """Send a gradient or a new version to another end."""
        if len(self.leaving) == self.most:
            self.leaving.popleft().wait()
        self.leaving.append(comm.isend(value, self.ends, end))

    def push(self) -> None:
        """The first stage has made a version: send it."""
        if self.ends is not None and self.ends.rank == 0:
            for end in self.last:
                self.send(self.weight.data.clone(), end)

    def pull(self, version: int) -> None:
        """The last stage is about to read a version: receive up to it."""
        while self.ends is not None and self.ends.rank in self.last and self.version < version:
            self.weight.data.copy_(comm.recv(self.weight.data, self.ends, 0))
            self.version += 1

    def give(self, grad: torch.Tensor, micro: int) -> None:
        """The last stage sends the gradient of a micro-batch to the rank where it entered."""
        self.send(grad.clone(), self.first[micro % len(self.first)])  # which is clipped in place meanwhile

    def take(self, micro: int) -> torch.Tensor:
        """The gradient of a micro-batch, from the rank where it left."""
        return comm.recv(self.weight.data, self.ends, self.last[micro % len(self.last)])

    def finish(self) -> None:
        """Wait until every message was sent."""
        while self.leaving:
            self.leaving.popleft().wait()


def unread(table: Stream) -> int:
    """How many gradients or versions of the embedding one end may have sent that the other has not read."""
    schedule = table.schedule
    if schedule.replicas:
        return 2 * schedule.ranks
    return 1 + -(-max(1, schedule.promise[0] - 1) // table.per_update)


class Ending:
    """How many batches of a stream run: all, or those until the run is `asked` to end, the same on every rank.

    Before each batch the first rank looks whether it is asked, and tells every other in one byte whether the batch
    `AHEAD` later is left out; a rank hears it before its own first operation of the batch. Those between run: receives
    for them may have been posted.
    """

    AHEAD = 2  # a mailbox posts so many receives

    def __init__(self, batches: int, everybody: Axis, asked: Callable[[], bool] | None):
        self.batches, self.all, self.asked, self.told, self.leaving = batches, everybody, asked, 0, deque()

    def before(self, batch: int) -> int:
        """How many batches run, as far as it is known before this one begins."""
        while self.asked and self.told <= batch and self.told + self.AHEAD < self.batches:
            if self.all.rank == 0:
                ends = torch.tensor([self.asked()])
                self.leaving += [comm.isend(ends, self.all, other) for other in range(1, self.all.size)]
            else:
                ends = comm.recv(torch.tensor([False]), self.all, 0)
            while len(self.leaving) > self.all.size**2:
                self.leaving.popleft().wait()  # of a batch whose backward has come back: it was read
            self.batches = self.told + self.AHEAD if ends else self.batches
            self.told += 1
        return self.batches

    def finish(self) -> None:
        """Wait until every message was sent."""
        for handle in self.leaving:
            handle.wait()


class Read(NamedTuple):
    """The version that an operation read, and the versions and bytes in the stash after it."""

    op: Op
    version: int
    held: frozenset[int]
    bytes: int


class Asynchronous(Pipeline):
    """The engine of a rank of a pipeline without a flush: `stream` in place of `run`.

    Bytes per rank: as in any pipeline; besides, the embedding's gradient goes from the last stage to the first, and
    its new weights come back. `record` has what each operation of the last stream read.
    """

    def __init__(self, model, mesh: Mesh, schedule: Schedule, table: Callable[[int], Stream]):
        super().__init__(model, mesh, schedule)
        self.table = table  # of so many batches
        self.all = mesh.axis("all", [mesh.world.ranks], own=True)  # its messages have an order of their own
        # who updates at the same time
        self.norm_axis = mesh.axis("stage", mesh.lines(NAMES[1:]), messages=False)
        self.record: list[Read] = []

    def run(self, micros, key, sync) -> torch.Tensor:
        """Raises ValueError: some stages update before others have their gradient."""
        raise ValueError(
            f"schedule={self.table(1).schedule.name} has no moment at which all stages hold a batch's gradients: each "
            "updates by itself. Use Trainer.stream, or schedule=1f1b."
        )

    def stream(self, batches: list[list], key, sync, update: Callable[[], None], asked=None) -> torch.Tensor:
        """Run batches (each a list of micro-batches) through and drain; this rank's part of each one's loss.

        `update` finishes this stage's gradients and steps its optimizer. `key` is (seed, first step) or None. Where
        `asked` begins to say that the run shall end, the batches under way are the last (`Ending`). At the end every
        stage holds its newest version, and no other.
        """
        table = self.table(len(batches))
        self.buffers = buffers_needed(table.schedule)
        step = PipelineStep(self, table.schedule, [m for batch in batches for m in batch], key)
        mine = (p for p in self.model.parameters() if not spec.of(p).tied_copy)  # that this stage updates
        stash, losses = Stash(mine), step.loss.new_zeros(len(batches))
        self.embedding = Embedding(self.model.wte and self.model.wte.weight, self.twins, table)
        ending, wanted = Ending(len(batches), self.all, asked), table.held(self.axis.rank)
        self.record.clear()
        self.held.clear()
        with self._hops():
            for n, op in enumerate(table.schedule.orders[self.axis.rank]):
                step.mailbox.units = ending.before(table.batch(op)) * table.per_update
                if op.micro >= step.mailbox.units:
                    continue
                stash.use(table.reads[op])
                self.embedding.pull(table.tied.get(op, 0))
                step.key = key and (key[0], key[1] + table.batch(op))
                read, version, self.micro = stash.used, table.makes(op), op.micro
                if version is not None:
                    sync.last_micro()
                step.run(op)
                losses[table.batch(op)] += step.loss
                step.loss.zero_()
                if version is not None:
                    stash.free(wanted[n] - {version} | {version - 1})  # before there is one more
                    self._update(stash, version, wanted[n], update)
                stash.free(wanted[n])
                self.held.append(len(step.held))
                self.record.append(Read(op, read, stash.versions, stash.bytes))
            self.embedding.pull(table.newest(0, ending.batches))
            for messages in (step.mailbox, self.embedding, ending):
                messages.finish()
        stash.use(table.newest(op.stage, ending.batches))
        return losses[: ending.batches]

    def _update(self, stash: Stash, version: int, wanted: frozenset[int], update) -> None:
        """Make a version from the one before it; that one is kept if an operation will still read it."""
        stash.use(version - 1)
        if version - 1 in wanted:
            stash.push()
        # Graphs of other micro-batches have saved these parameters: autograd must not notice the change.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.model.parameters())):
            update()
        stash.used = version
        self.embedding.push()

    def tie(self, pieces, mesh: Mesh) -> None:
        """The last stage sends its gradient of the tied embedding to the first, which adds it to its own."""
        for piece in pieces if self.twins is not None else ():
            if piece.name in self.shared and piece.spec.tied_copy:
                self.embedding.give(piece.tensor.grad, self.micro)
                piece.tensor.grad = None  # so that nothing here updates it
            elif piece.name in self.shared:
                piece.tensor.grad += self.embedding.take(self.micro)


def stream_of(plan, batches: int) -> Stream:
    """The stream that a plan names; a batch is its `micro` micro-batches, of which `active` may be in progress."""
    return make_stream(find(plan.schedule).name, plan.pp, batches, plan.micro, plan.active or None)


def apply_asynchronous(model, mesh: Mesh, plan) -> Asynchronous:
    """Keep this rank's stage of the model, in place; returns the engine that streams the plan's batches through."""
    order = free_running(plan.pp, plan.micro, plan.active or None)
    engine = Asynchronous(model, mesh, order, partial(stream_of, plan))
    engine.keep_inputs_only = plan.recompute
    return engine


def check(config, plan, rows: int, length: int) -> None:
    """Raise ValueError, before any process starts, where an asynchronous plan has no meaning."""
    if plan.zero:
        raise ValueError(
            f"schedule={plan.schedule} keeps versions of whole weights on every replica, which zero={plan.zero} shares "
            "out. Use zero=0, or schedule=1f1b."
        )
    if stream_of(plan, 1).schedule.name == "ampnet" and plan.recompute:
        raise ValueError(
            "schedule=ampnet with recompute=true would run the forward again with other weights than the first time. "
            "Use recompute=false, or schedule=pipedream, which keeps the weights."
        )
