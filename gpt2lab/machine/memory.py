"""Measured memory of one rank: every allocation, and the bytes of tensors' storages."""

import gc
import inspect
import os
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# otherwise the profiler prints a line whenever it starts or stops
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@dataclass(frozen=True)
class Allocation:
    """At `time` (seconds from the first) the allocator gave (if negative: freed) `bytes`; `held` is the sum so far."""

    time: float
    bytes: int
    held: int


@contextmanager
def allocations():
    """Record the allocations of torch's CPU allocator inside the block; the list is complete when the block ends.

    `held` starts at 0: memory from before does not count, unless it is freed inside the block. Garbage is collected
    first, so that Python does not free it in here.
    """
    gc.collect()
    found = []
    with profiled(profile_memory=True) as profile:
        yield found
    of_all = profile.profiler.kineto_results.events()
    events, held = sorted((e.start_ns(), e.nbytes()) for e in of_all if e.name() == "[memory]"), 0
    for when, size in events:
        held += size
        found.append(Allocation((when - events[0][0]) * 1e-9, size, held))


@contextmanager
def profiled(**options):
    """torch's profiler on this rank's CPU, without its output on the console."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with _quiet(), torch.profiler.profile(activities=cpu, **options) as profile:
        yield profile


@contextmanager
def _quiet():
    """Suppress the allocator's message when memory from before the record is freed inside."""
    console, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(console, 2)
        os.close(console)
        os.close(nowhere)


class Alive:
    """How much of some memory is still allocated, by weak references: watching does not keep it alive."""

    def __init__(self):
        self._seen = {}  # bytes by storage

    def watch(self, tensor: torch.Tensor) -> None:
        """Watch the memory behind a tensor from now on."""
        storage = tensor.untyped_storage()
        self._seen[StorageWeakRef(storage)] = storage.nbytes()

    def bytes(self) -> int:
        """Bytes of the watched memory that have not been freed."""
        self._seen = {ref: size for ref, size in self._seen.items() if not ref.expired()}
        return sum(self._seen.values())


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors: a shared storage counts once, a view counts its whole storage."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def held(model, sync, optimizer) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state that this rank holds now."""
    weights = [*(p.data for p in model.parameters()), *sync.weight_memory()]
    state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.dim()]
    parts = {"weights": weights, "gradients": sync.gradient_memory(), "optimizer": state}
    return {part: bytes_of(tensors) for part, tensors in parts.items()}


def after_backward(trainer, batch) -> dict[str, int]:
    """`held` at the end of the second step's backward (the first step makes the optimizer's state)."""
    trainer.step(batch)
    trainer.optimizer.zero_grad()
    parallel = trainer.parallel
    parallel.engine.run(parallel.mine(batch), None, parallel.sync)
    found = held(parallel.model, parallel.sync, trainer.optimizer)
    parallel.sync.finish()
    return found


def over_a_step(trainer, batch, steps: int = 1) -> list[int]:
    """Bytes that this rank holds over a step, or a stream of several, after each allocation.

    Takes a step more: the first one makes the optimizer's state.
    """
    trainer.step(batch)
    trainer.optimizer.zero_grad()  # memory from before the record must not be freed inside
    if hasattr(loss := inspect.unwrap(trainer.parallel.model.loss), "buffer"):
        loss.buffer = None  # a chunked loss makes it anew, so that it is counted
    before = sum(held(trainer.parallel.model, trainer.parallel.sync, trainer.optimizer).values())
    with allocations() as events:
        trainer.stream([batch] * steps)
    return [before + e.held for e in events]
