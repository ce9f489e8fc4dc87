"""The memory that the ranks of one group share: an anonymous file that disappears with them, and how they open it.

The first rank makes it (memfd_create: no name in any folder, no limit of /dev/shm) and publishes in the store where it
can be opened, /proc/<process>/fd/<number>, which the system allows only to the same user. A page takes memory only
once it is written, so a group that never sends large tensors stays small.
"""

import ctypes
import mmap
import os
import secrets
from pathlib import Path
from typing import NamedTuple

import torch

from . import semaphores

SLOT = 1 << 21  # bytes in a slot of the stream from one rank to all others
MESSAGE_SLOT = 1 << 18  # bytes in a slot of the stream of a pair
SLOTS = 2  # one is written while the other is read
NOTE = 24  # bytes of a delivery's header: slot, size, kind
WORD = 8
TOKEN = 32


class Pair(NamedTuple):
    """What one writer and one reader share: the addresses of two semaphores, and two offsets in the memory.

    `full` is posted for a delivery, `free` for a slot that was read; `wanted` is 1 while the writer waits for a slot;
    `notes` are the headers of the deliveries.
    """

    full: int
    free: int
    wanted: int
    notes: int


class Memory:
    """The shared bytes and their layout.

    Each rank has a page (its process, whether it has left, its wakeup semaphore) and a stream to all others; each pair
    of ranks has the semaphores of both streams between them, and a stream of its own.
    """

    def __init__(self, descriptor: int, ranks: int):
        self.ranks, pairs = ranks, ranks * ranks
        per_pair = 4 * semaphores.SIZE + 2 * (WORD + SLOTS * NOTE)
        self._pair_size = -(-per_pair // semaphores.SIZE) * semaphores.SIZE
        self._pairs_at = self._page(ranks)
        head = self._pairs_at + pairs * self._pair_size
        self._slots_at = -(-head // mmap.PAGESIZE) * mmap.PAGESIZE
        self._messages_at = self._slots_at + ranks * SLOTS * SLOT
        self.size = self._messages_at + pairs * SLOTS * MESSAGE_SLOT
        if os.fstat(descriptor).st_size == 0:
            os.ftruncate(descriptor, self.size)
        self.raw = mmap.mmap(descriptor, self.size)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.raw))
        self.bytes = torch.frombuffer(self.raw, dtype=torch.uint8)

    def prepare(self, token: bytes) -> None:
        """Initialise the semaphores, and write the token that names this memory; only the first rank does this."""
        for rank in range(self.ranks):
            semaphores.prepare(self.wakeup(rank))
        for writer in range(self.ranks):
            for reader in range(self.ranks):
                for number in range(4):
                    semaphores.prepare(self._pair(writer, reader) + self.base + number * semaphores.SIZE)
        self.raw[:TOKEN] = token

    def _pair(self, writer: int, reader: int) -> int:
        return self._pairs_at + (writer * self.ranks + reader) * self._pair_size

    def _page(self, rank: int) -> int:
        return mmap.PAGESIZE * (1 + rank)

    def wakeup(self, rank: int) -> int:
        """The semaphore that a rank sleeps on: posted for every delivery to it."""
        return self.base + self._page(rank) + semaphores.SIZE

    def pair(self, writer: int, reader: int, messages: bool) -> Pair:
        """What a writer and a reader share for its stream to all (or, with `messages`, for the stream of the pair)."""
        at, number = self._pair(writer, reader), 2 * messages
        full = self.base + at + number * semaphores.SIZE
        words = at + 4 * semaphores.SIZE + messages * (SLOTS * NOTE + WORD)
        return Pair(full, full + semaphores.SIZE, words, words + WORD)

    def slots(self, writer: int, reader: int | None = None) -> list[torch.Tensor]:
        """The slots of the stream from `writer` to all others, or to one reader, as bytes."""
        at, size = self._slots_at + writer * SLOTS * SLOT, SLOT
        if reader is not None:
            size = MESSAGE_SLOT
            at = self._messages_at + (writer * self.ranks + reader) * SLOTS * size
        return [self.bytes[at + number * size : at + (number + 1) * size] for number in range(SLOTS)]

    def sign(self, rank: int) -> None:
        """Write this rank's process number."""
        at = self._page(rank)
        self.raw[at : at + WORD] = os.getpid().to_bytes(WORD, "little")

    def leave(self, rank: int) -> None:
        """Mark this rank as having left the group."""
        self.raw[self._page(rank) + WORD] = 1

    def gone(self, rank: int) -> str:
        """Why nothing can come from a rank any more; empty while it can."""
        at = self._page(rank)
        if self.raw[at + WORD]:
            return "has left the group"
        process = int.from_bytes(self.raw[at : at + WORD], "little")
        return "" if process == 0 or _lives(process) else f"is gone (process {process} ended)"


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def connect(store, rank: int, ranks: int) -> Memory:
    """Make the memory (rank 0) or open it; returns when every rank has it.

    Raises RuntimeError when a rank cannot open it: the ranks are on several machines, or belong to several users.
    """
    if rank == 0:
        token = secrets.token_bytes(TOKEN)
        descriptor = os.memfd_create("gpt2lab", os.MFD_CLOEXEC)
        try:
            memory = Memory(descriptor, ranks)
            memory.prepare(token)
            store.set("where", f"{os.getpid()} {descriptor} {token.hex()}")
            store.wait([f"there {peer}" for peer in range(1, ranks)])
        finally:
            os.close(descriptor)
        refused = [store.get(f"there {peer}").decode() for peer in range(1, ranks)]
        if any(refused):
            raise RuntimeError(next(text for text in refused if text))
    else:
        process, number, token = store.get("where").decode().split()
        memory, why = _open(f"/proc/{process}/fd/{number}", ranks, bytes.fromhex(token))
        why = why and (
            f"Rank {rank} cannot open the memory of rank 0 ({why}): backend 'shm' needs ranks of one machine and one "
            "user. Otherwise use 'gloo' (backend='gloo', or GPT2LAB_BACKEND=gloo for all)."
        )
        store.set(f"there {rank}", why)
        if why:
            raise RuntimeError(why)
    memory.sign(rank)
    return memory


def _open(path: str, ranks: int, token: bytes) -> tuple[Memory | None, str]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return None, error.strerror
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:gpt2lab"):
            return None, "it is another file"
        memory = Memory(descriptor, ranks)
        return (memory, "") if memory.raw[:TOKEN] == token else (None, "it belongs to another group")
    finally:
        os.close(descriptor)
