"""A stream: one rank writes into slots, the ranks it names read them. All that moves, moves through streams.

`Outgoing` and `Incoming` are its two ends. What may have to wait is a generator that yields `Need`s; the engine goes
on with it once the need is met.
"""

import struct
from collections import deque
from typing import NamedTuple

import torch

from gpt2lab.transport import semaphores
from gpt2lab.transport.memory import NOTE, SLOTS, Memory

_note = struct.Struct("<QQQ")  # number of the slot, bytes in it, kind of the call


class Need(NamedTuple):
    """A semaphore to take before going on, and the rank that will post it."""

    semaphore: int
    peer: int


class Misfit(RuntimeError):
    """What arrives is not what the receiver's call expects."""


class Outgoing:
    """The writer's end. A slot is used again when all who were to read it have."""

    def __init__(self, memory: Memory, writer: int, reader: int | None = None):
        messages = reader is not None
        self.slots = memory.slots(writer, reader)
        self.size = self.slots[0].numel()
        self._memory = memory
        readers = [reader] if messages else [r for r in range(memory.ranks) if r != writer]
        self._ends = {r: (*memory.pair(writer, r, messages), memory.bell(r)) for r in readers}
        self._sent = dict.fromkeys(readers, 0)
        self._in_use: deque[tuple[int, ...]] = deque()
        self._next = 0

    def claim(self):
        """A slot to write into, as bytes; waits until its former readers are done with it."""
        if len(self._in_use) == SLOTS:
            yield from self._reclaim()
        return self.slots[self._next]

    def _reclaim(self):
        for reader in self._in_use[0]:
            yield Need(self._ends[reader][1], reader)
        self._in_use.popleft()

    def deliver(self, readers, size: int, kind: int) -> None:
        """Hand the claimed slot, with `size` bytes in it, to the readers."""
        for reader in readers:
            full, _, notes, bell = self._ends[reader]
            place = notes + self._sent[reader] % SLOTS * NOTE
            _note.pack_into(self._memory.raw, place, self._next, size, kind)
            self._sent[reader] += 1
            semaphores.post(full)
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
        self.slots = memory.slots(writer, reader if messages else None)
        self.size = self.slots[0].numel()
        self.writer = writer
        self._memory = memory
        self._full, self._free, self._notes = memory.pair(writer, reader, messages)
        self._bell = memory.bell(writer)
        self._read = 0

    def next(self, size: int, kind: int):
        """The next delivery, as `size` bytes; waits for it. Raises Misfit when it belongs to another call."""
        yield Need(self._full, self.writer)
        place = self._notes + self._read % SLOTS * NOTE
        slot, there, what = _note.unpack_from(self._memory.raw, place)
        if there != size or what != kind:
            raise Misfit(self.writer, what, there, kind, size)
        self._read += 1
        return self.slots[slot][:size]

    def release(self) -> None:
        """Give the slot back to the writer."""
        semaphores.post(self._free)
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


def fill(slot: torch.Tensor, x: torch.Tensor, at: int = 0) -> None:
    """Copy a flat tensor into a slot, `at` bytes from its beginning."""
    size = x.numel() * x.element_size()
    slot[at : at + size].view(x.dtype).copy_(x)
