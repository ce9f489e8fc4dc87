"""Parameter servers that apply one gradient after the other, in an order that a seed decides and a log remembers.

Workers are at most `bound` clocks apart (stale synchronous parallel): 0 is bulk synchronous, None without a bound. The
weights are cut into equal stretches over the servers, which all take gradients in this order. A run may be paced: then
workers are as slow as the order says.

Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server"; Li et al. 2014.
"""

import random
import time
from typing import NamedTuple

import torch

from ...corpus.batches import Batch
from ...model import GPT2, GPT2Config
from ...ranks import comm
from ...ranks.mesh import Mesh
from .instruments import in_float64
from .local_sgd import flat


class WorkerEvent(NamedTuple):
    """A worker pulls weights or pushes its gradient; `clock` counts its own steps, `time` is when it happens."""

    time: float
    kind: str
    worker: int
    clock: int


class Applied(NamedTuple):
    """An entry of the servers' log: whose gradient, of which clock, read at which version, applied as which update."""

    worker: int
    clock: int
    read: int
    update: int


def may_start(clock: int, slowest: int, bound: int | None) -> bool:
    """Whether a worker that has finished `clock` steps may pull: it is at most `bound` steps ahead of the slowest."""
    return bound is None or clock - slowest <= bound


def arrivals(seconds: list[float], steps: int, bound: int | None, seed: int = 0) -> list[WorkerEvent]:
    """The order of all pulls and pushes: worker k needs about `seconds[k]` a step, give or take a tenth by the seed."""
    dice, clocks = random.Random(seed), [0] * len(seconds)
    waiting, under_way, events, now = set(range(len(seconds))), {}, [], 0.0
    while waiting or under_way:
        for worker in sorted(waiting):
            if may_start(clocks[worker], min(clocks), bound):
                waiting.remove(worker)
                events.append(WorkerEvent(now, "pull", worker, clocks[worker]))
                under_way[worker] = now + seconds[worker] * dice.uniform(0.9, 1.1)
        worker = min(under_way, key=under_way.get)
        now = under_way.pop(worker)
        events.append(WorkerEvent(now, "push", worker, clocks[worker]))
        clocks[worker] += 1
        if clocks[worker] < steps:
            waiting.add(worker)
    return events


def rows_gradient(model: GPT2, weights: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The gradient (P,) of the summed loss of some rows over the global number of target tokens, at flat weights."""
    torch.nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    loss = model.loss(model(batch.tokens), batch.targets) / batch.total
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


@in_float64()
def serve(
    rank: int,
    world_size: int,
    servers: int,
    config: GPT2Config,
    batches: list[Batch],
    events,
    lr: float,
    unit=0.0,
):
    """One rank: a server (the first ones), which returns its stretch of the weights and its log, or a worker.

    Worker k computes its rows of batches[clock], and sleeps until the time of its push, `unit` seconds for a unit of
    the order's times; it returns the seconds it took, and no log. Bytes: S pushed and S pulled for every step.
    """
    world, model = Mesh(dp=world_size)["dp"], GPT2(config).double()
    comm.clear_log()
    weights = flat(model)
    comm.barrier(world)
    if rank < servers:
        mine = weights.tensor_split(servers)[rank].clone()
        return (*_serve(mine, world, servers, events, lr), dict(comm.traffic()))
    start = time.perf_counter()
    timed = [event._replace(time=start + unit * event.time) for event in events]
    _work(rank - servers, world, servers, model, weights, batches, timed)
    return time.perf_counter() - start, [], dict(comm.traffic())


def _serve(mine, world, servers, events, lr):
    read, log, leaving = {}, [], []
    for _, kind, worker, clock in events:
        if kind == "pull":
            read[worker] = len(log)
            leaving.append(comm.isend(mine.clone(), world, servers + worker))
        else:
            mine -= lr * comm.irecv(mine, world, servers + worker).wait()
            log.append(Applied(worker, clock, read[worker], len(log)))
    for handle in leaving:
        handle.wait()
    return mine, log


def _work(worker, world, servers, model, weights, batches, events):
    workers = world.size - servers
    for event in (event for event in events if event.worker == worker):
        if event.kind == "pull":
            parts = weights.tensor_split(servers)
            pulled = torch.cat([comm.irecv(p, world, s).wait() for s, p in enumerate(parts)])
            found = rows_gradient(model, pulled, batches[event.clock].rows(worker, workers))
        else:
            time.sleep(max(0.0, event.time - time.perf_counter()))
            pushed = [comm.isend(p, world, s) for s, p in enumerate(found.tensor_split(servers))]
            for handle in pushed:
                handle.wait()


def replay(config: GPT2Config, batches: list[Batch], log: list[Applied], workers: int, lr: float, model=None):
    """All versions of the flat weights, from the log alone, in one process; the last is what the servers hold.

    They start as those of `model` (default: a new one).
    """
    model = model or GPT2(config).double()
    versions = [flat(model)]
    for worker, clock, read, _ in log:
        rows = batches[clock].rows(worker, workers)
        versions.append(versions[-1] - lr * rows_gradient(model, versions[read], rows))
    return versions
