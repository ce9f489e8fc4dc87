"""A stream: one rank writes into slots, the ranks it names read them. All that moves, moves through streams.

`Outgoing` and `Incoming` are its two ends. What may have to wait is a generator that yields `Need`s; the engine goes
on with it once the need is met.
"""

import struct
from collections import deque
from typing import NamedTuple

import torch

from . import semaphores
from .memory import NOTE, SLOTS, Memory

VIEWS = 256  # of one slot that are kept
_note = struct.Struct("<QQQ")  # number of the slot, bytes in it, kind of the call


class Need(NamedTuple):
    """A semaphore to take before going on, and the rank that will post it."""

    semaphore: int
    peer: int


class Misfit(RuntimeError):
    """What arrives is not what the receiver's call expects."""


class Slot:
    """A piece of shared memory, seen as tensors; the same views come again and again and are kept."""

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
    """The writer's end. A slot is used again when all who were to read it have."""

    def __init__(self, memory: Memory, writer: int, reader: int | None = None):
        messages = reader is not None
        self._slots = [Slot(part) for part in memory.slots(writer, reader)]
        self.size = self._slots[0].size
        self._memory, self._bell = memory, memory.bell(writer)
        readers = [reader] if messages else [r for r in range(memory.ranks) if r != writer]
        self._ends = {r: (memory.pair(writer, r, messages), memory.bell(r)) for r in readers}
        self._sent = dict.fromkeys(readers, 0)
        self._in_use: deque[tuple[int, ...]] = deque()
        self._next = 0

    def claim(self):
        """A slot to write into; waits until its former readers are done with it."""
        if len(self._in_use) == SLOTS:
            yield from self._reclaim()
        return self._slots[self._next]

    def _reclaim(self):
        """Readers ring the bell for a slot given back only when its writer says that it waits.

        A slot may come back while the writer says so. Therefore it rings its own bell: `post` orders memory, so either
        the reader sees the word, or the writer, who looks once more before it sleeps, sees the slot.
        """
        for reader in self._in_use[0]:
            pair, _ = self._ends[reader]
            if not semaphores.take(pair.free):
                self._memory.raw[pair.wanted] = 1
                semaphores.post(self._bell)
                yield Need(pair.free, reader)
                self._memory.raw[pair.wanted] = 0
        self._in_use.popleft()

    def deliver(self, readers, size: int, kind: int) -> None:
        """Hand the claimed slot, with `size` bytes in it, to the readers."""
        for reader in readers:
            pair, bell = self._ends[reader]
            place = pair.notes + self._sent[reader] % SLOTS * NOTE
            _note.pack_into(self._memory.raw, place, self._next, size, kind)
            self._sent[reader] += 1
            semaphores.post(pair.full)
            semaphores.post(bell)
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
        self._bell = memory.bell(writer)
        self._read = 0

    def next(self, size: int, kind: int):
        """The slot of the next delivery; waits for it. Raises Misfit when it belongs to another call."""
        yield Need(self._pair.full, self.writer)
        place = self._pair.notes + self._read % SLOTS * NOTE
        slot, there, what = _note.unpack_from(self._memory.raw, place)
        if there != size or what != kind:
            raise Misfit(self.writer, what, there, kind, size)
        self._read += 1
        return self._slots[slot]

    def release(self) -> None:
        """Give the slot back to the writer."""
        semaphores.post(self._pair.free)
        if self._memory.raw[self._pair.wanted]:
            semaphores.post(self._bell)


class Ends:
    """One rank's ends of all streams of a group: to all others and from each; messages to and from each."""

    def __init__(self, memory: Memory, rank: int):
        self.rank, self.ranks = rank, memory.ranks
        self.peers = [r for r in range(memory.ranks) if r != rank]
        self.out = Outgoing(memory, rank)
        self.coming = {peer: Incoming(memory, peer, rank, messages=False) for peer in self.peers}
        self.send_to = {peer: Outgoing(memory, rank, peer) for peer in self.peers}
        self.recv_from = {peer: Incoming(memory, peer, rank, messages=True) for peer in self.peers}
