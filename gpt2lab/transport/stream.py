"""A stream: one rank writes into slots, the ranks it names read them. All data moves through streams.

`Outgoing` and `Incoming` are its two ends. A method that may have to wait is a generator that yields `Need`s; the
engine resumes it once the need is met.
"""

import struct
from collections import deque
from typing import NamedTuple

import torch

from . import semaphores
from .memory import NOTE, SLOTS, Memory

VIEWS = 256  # views of one slot that are cached
_note = struct.Struct("<QQQ")  # number of the slot, bytes in it, kind of the call


class Need(NamedTuple):
    """A semaphore to take before continuing, and the rank that will post it."""

    semaphore: int
    peer: int


class UnexpectedDelivery(RuntimeError):
    """What arrives is not what the receiver's call expects."""


class Slot:
    """A part of shared memory, seen as tensors; views are cached because the same ones are used again and again."""

    def __init__(self, memory: torch.Tensor):
        self.size = memory.numel()
        self._memory = memory
        self._views: dict[tuple, torch.Tensor] = {}

    def like(self, x: torch.Tensor, at: int = 0) -> torch.Tensor:
        """A tensor of x's length and dtype, `at` bytes from the beginning."""
        key = (x.numel(), x.dtype, at)
        view = self._views.get(key)
        if view is None:
            if len(self._views) == VIEWS:
                self._views.clear()
            view = self._memory[at : at + x.numel() * x.element_size()].view(x.dtype)
            self._views[key] = view
        return view


class Outgoing:
    """The writer's end. A slot is used again when all of its readers have read it."""

    def __init__(self, memory: Memory, writer: int, reader: int | None = None):
        messages = reader is not None
        self._slots = [Slot(part) for part in memory.slots(writer, reader)]
        self.size = self._slots[0].size
        self._memory, self._wakeup = memory, memory.wakeup(writer)
        readers = [reader] if messages else [r for r in range(memory.ranks) if r != writer]
        self._ends = {r: (memory.pair(writer, r, messages), memory.wakeup(r)) for r in readers}
        self._sent = dict.fromkeys(readers, 0)
        self._in_use: deque[tuple[int, ...]] = deque()
        self._next = 0

    def claim(self):
        """A slot to write into; waits until its last readers have read it."""
        if len(self._in_use) == SLOTS:
            yield from self._reclaim()
        return self._slots[self._next]

    def _reclaim(self):
        """Wait for the oldest slot in use. Its readers wake the writer only if `wanted` is set.

        A reader may free the slot while the writer sets `wanted`. Therefore the writer posts its own wakeup as well:
        `post` orders memory, so either the reader sees `wanted`, or the writer, which looks once more before it
        sleeps, sees the free slot.
        """
        for reader in self._in_use[0]:
            pair, _ = self._ends[reader]
            if not semaphores.take(pair.free):
                self._memory.raw[pair.wanted] = 1
                semaphores.post(self._wakeup)
                yield Need(pair.free, reader)
                self._memory.raw[pair.wanted] = 0
        self._in_use.popleft()

    def deliver(self, readers, size: int, kind: int) -> None:
        """Deliver the claimed slot, with `size` bytes in it, to the readers."""
        for reader in readers:
            pair, wakeup = self._ends[reader]
            offset = pair.notes + self._sent[reader] % SLOTS * NOTE
            _note.pack_into(self._memory.raw, offset, self._next, size, kind)
            self._sent[reader] += 1
            semaphores.post(pair.full)
            semaphores.post(wakeup)
        self._in_use.append(tuple(readers))
        self._next = (self._next + 1) % SLOTS

    def settle(self):
        """Wait until everything delivered has been read."""
        while self._in_use:
            yield from self._reclaim()


class Incoming:
    """A reader's end."""

    def __init__(self, memory: Memory, writer: int, reader: int, messages: bool):
        self._slots = [Slot(part) for part in memory.slots(writer, reader if messages else None)]
        self.size = self._slots[0].size
        self.writer = writer
        self._memory = memory
        self._pair = memory.pair(writer, reader, messages)
        self._wakeup = memory.wakeup(writer)
        self._read = 0

    def next(self, size: int, kind: int):
        """The slot of the next delivery; waits for it. Raises UnexpectedDelivery when it belongs to another call."""
        yield Need(self._pair.full, self.writer)
        offset = self._pair.notes + self._read % SLOTS * NOTE
        slot, there, what = _note.unpack_from(self._memory.raw, offset)
        if there != size or what != kind:
            raise UnexpectedDelivery(self.writer, what, there, kind, size)
        self._read += 1
        return self._slots[slot]

    def release(self) -> None:
        """Free the slot for the writer."""
        semaphores.post(self._pair.free)
        if self._memory.raw[self._pair.wanted]:
            semaphores.post(self._wakeup)


class StreamEnds:
    """One rank's ends of all streams of a group: to all others and from each; messages to and from each."""

    def __init__(self, memory: Memory, rank: int):
        self.rank, self.ranks = rank, memory.ranks
        self.peers = [r for r in range(memory.ranks) if r != rank]
        self.out = Outgoing(memory, rank)
        self.coming = {peer: Incoming(memory, peer, rank, messages=False) for peer in self.peers}
        self.send_to = {peer: Outgoing(memory, rank, peer) for peer in self.peers}
        self.recv_from = {peer: Incoming(memory, peer, rank, messages=True) for peer in self.peers}
