"""Runs of live ranks that the step player shows: paced, and each rank notes what it holds.

Every function returns, on each rank, (spans, communication log): a list of them is what `player.play` takes.
"""

import math
import time
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from ...model import GPT2, GPT2Config
from ...parallel.accumulate import Alone
from ...parallel.context import ring as ring_module
from ...parallel.context import ulysses
from ...parallel.context.borrow import Share
from ...parallel.context.layouts import layout
from ...parallel.pipeline.engine import Pipeline
from ...parallel.zero.flat import part_of
from ...ranks import comm, paced, trace
from ...ranks.mesh import Mesh
from ...reference import example_batch
from ...schedules import Cost, make
from . import data
from .instruments import asleep, begin, trainer_by

WORK, HOP = 0.03, 0.03
"""Seconds of one piece of work and of one message."""

TINY = GPT2Config(vocab_size=64, n_positions=8, n_layer=4, n_head=2, n_embd=16)
DEEPER = replace(TINY, n_layer=8)


class Shelf:
    """What a rank holds, by name, from `put` to `take`."""

    def __init__(self, rank: int):
        self.rank, self.since, self.spans = rank, {}, []

    def put(self, name: str) -> None:
        """The rank holds this from now on."""
        self.since.setdefault(name, time.perf_counter())

    def take(self, name: str) -> None:
        """The rank holds this no longer."""
        if name in self.since:
            self.spans.append(_hold(name, self.since.pop(name), time.perf_counter(), self.rank))

    def run(self) -> tuple[list, list]:
        """The rank's part of the run."""
        for name in list(self.since):
            self.take(name)
        return trace.spans(with_comm=False) + self.spans, list(comm.log)


def _hold(name: str, start: float, end: float, rank: int) -> trace.Span:
    return trace.Span(name, "other", start, end, rank, "holds")


def _begin(axis) -> Shelf:
    begin(axis)
    return Shelf(axis.ranks[axis.rank])


@contextmanager
def _working(name: str, kind: str, seconds: float = WORK):
    with trace.span(name, kind):
        yield
        time.sleep(seconds)


def ring_steps(rank: int, world_size: int):
    """A ring all-reduce of one chunk a rank. `2: 013` is chunk 2, the sum of the numbers of ranks 0, 1 and 3."""
    axis, n = Mesh(dp=world_size)["dp"], world_size
    shelf, chunks = _begin(axis), list(torch.eye(n)[rank].repeat(n, 1))
    named = lambda c: f"{c}: " + "".join(str(r) for r in range(n) if chunks[c][r])
    for c in range(n):
        shelf.put(named(c))
    with paced.use(paced.Link(HOP, math.inf)):
        for step in range(2 * (n - 1)):
            out, into = (rank - step) % n, (rank - step - 1) % n
            going = comm.isend(chunks[out], axis, (rank + 1) % n)
            came = comm.irecv(chunks[into], axis, (rank - 1) % n).wait()
            going.wait()
            with _working("add" if step < n - 1 else "keep", "other", WORK / 2):
                shelf.take(named(into))
                chunks[into] = came + chunks[into] if step < n - 1 else came
                shelf.put(named(into))
    return shelf.run()


def buckets(rank: int, world_size: int, layers_each: int, overlap: bool):
    """A paced backward of eight layers with its sums; a rank holds its own gradient `g`, then the sum `s`."""
    data.backward(rank, world_size, layers_each, overlap)
    spans, log, layers = trace.spans(with_comm=False), list(comm.log), range(data.LAYERS - 1, -1, -1)
    work = [s for s in spans if s.name == "B"]
    named = [replace(s, name=f"B{layer}") for s, layer in zip(work, layers, strict=True)]
    end, each = max(s.end for s in spans), layers_each if overlap else 1
    sums = [e for e in log if e.op == "all_reduce"]
    if not overlap:
        sums.reverse()  # the naive form goes from the first tensor to the last
    for i, (layer, span) in enumerate(zip(layers, work, strict=True)):
        there = sums[i // each].end
        named += [_hold(f"g{layer}", span.end, there, rank), _hold(f"s{layer}", there, end, rank)]
    return named + [s for s in spans if s.name != "B"], log


def zero3(rank: int, world_size: int):
    """A step of ZeRO-3 over four blocks; a rank holds whole weights only from gather to release."""
    trainer = trainer_by(f"dp={world_size},zero=3", TINY)
    parallel, batch = trainer.parallel, example_batch(TINY, rows=world_size, length=8)
    trainer.gradients(batch)
    shelf = _begin(parallel.mesh.world)
    noted = {f: part_of(f.names[0]) for f in parallel.sync.flats if f.names[0].startswith("h.")}
    for f, name in noted.items():
        f.gather = _then(f.gather, lambda f=f, name=name: shelf.put(name) if f.full is not None else None)
        f.drop = _then(f.drop, lambda name=name: shelf.take(name))
    for i, block in parallel.model.h.items():
        block.forward = _slow(block.forward, i)
    with paced.use(paced.Link(HOP / 2, math.inf)):
        trainer.gradients(batch)
    return shelf.run()


def _then(first, second):
    def both():
        first()
        second()

    return both


def _slow(forward, i: str):
    def slow(*given):
        again = torch.is_grad_enabled()  # in backward, the block runs a second time
        with _working(f"{'B' if again else 'F'}{i}", "backward" if again else "forward"):
            return forward(*given)

    return slow


def pipeline_spans(rank: int, world_size: int, name: str, micros: int, cost: Cost, model=None) -> list:
    """The same run as spans alone: work, and each message for the time of its hop."""
    spans, log = pipeline_steps(rank, world_size, name, micros, cost, model)
    sends = [trace.Span("send pp", "comm", e.start, e.start + float(cost.hop), rank, "comm") for e in log]
    return [s for s in spans if s.lane == "work"] + sends


def pipeline_steps(rank: int, world_size: int, name: str, micros: int, cost: Cost, model=None):
    """Two steps of a pipeline, the second recorded; a rank holds a micro-batch from forward to the end of backward."""
    mesh = Mesh(pp=world_size)
    engine = Pipeline(model or GPT2(DEEPER), mesh, make(name, world_size, micros))
    batch = example_batch(TINY, rows=micros, length=8).micro(micros)
    engine.run(batch, None, Alone())  # first messages make connections, the first backward loads libraries
    _begin(mesh["pp"])
    engine.pace = cost
    engine.run(batch, None, Alone())
    spans = trace.spans(with_comm=False)
    at = {s.name: s for s in spans if s.kind in ("forward", "backward")}
    held = [_hold(f"m{i}", at[f"F{i}"].end, at[f"B{i}"].end, rank) for i in range(micros)]
    on_the_way = lambda e: replace(e, ended=e.start + (float(cost.hop) or WORK / 3))  # whoever waits for it
    return list(at.values()) + held, [on_the_way(e) for e in comm.log if e.targets]


def ring_attention(rank: int, world_size: int):
    """Ring attention over six tokens, forward and backward; `kv0` are rank 0's keys and values."""
    share = Share(layout("interleaved", 2 * world_size, world_size), Mesh(cp=world_size)["cp"])
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 2, 4))
    ring_module.ring(q, k, v, share).sum().backward()  # connections and libraries
    shelf, trip = _begin(share.axis), ring_module.Trip

    def noted(self, right=trip.finish_step):
        leaving = self.source
        right(self)
        shelf.take(f"kv{leaving}")
        if self.held is not None:
            shelf.put(f"kv{self.source}")

    def working(right, kind):
        def work(*given):
            with _working(f"q{rank} x kv{given[-3][0] % world_size}", kind, 2 * WORK):
                return right(*given)

        return work

    with (
        patch.object(trip, "finish_step", noted),
        patch.object(ring_module, "block_forward", working(ring_module.block_forward, "forward")),
        patch.object(ring_module, "block_backward", working(ring_module.block_backward, "backward")),
        paced.use(paced.Link(HOP, math.inf)),
    ):
        shelf.put(f"kv{rank}")
        y = ring_module.ring(q, k, v, share)
        shelf.put(f"kv{rank}")
        y.sum().backward()
    spans, log = shelf.run()
    return [s for s in spans if s.lane == "holds" or " x " in s.name], log


def heads_steps(rank: int, world_size: int):
    """Heads for tokens and back, around attention, forward and backward."""
    share = Share(layout("contiguous", 4 * world_size, world_size), Mesh(cp=world_size)["cp"])
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, world_size, 4, 4))
    shelf, right = _begin(share.axis), ulysses.block_attention
    tokens, whole = f"{4} tokens, {world_size} heads", f"{4 * world_size} tokens, 1 head"

    def turned(gone, here):
        shelf.take(gone)
        shelf.put(here)

    def attention(*given):
        turned(tokens, whole)
        with _working("attention", "forward"):
            y = right(*given)
        y.register_hook(backward)
        return y

    def backward(_):
        turned(tokens, whole)
        asleep("its backward", "backward", WORK)

    with patch.object(ulysses, "block_attention", attention), paced.use(paced.Link(HOP, math.inf)):
        shelf.put(tokens)
        y = ulysses.heads(q, k, v, share)
        turned(whole, tokens)
        asleep("mlp", "forward", WORK)
        y.sum().backward()
        turned(whole, tokens)
        asleep("mlp", "backward", WORK)
    return shelf.run()
