"""The status board: a small piece of shared memory in which every rank publishes its current call.

A rank writes a record when it starts a communication call and clears it when the call is done; the parent process
reads the records to explain a hang. The board also keeps the last calls of every rank, so that two ranks that make
different calls at the same position find out before any data moves. Without a board (a script under torchrun, a test
without ranks) a rank only remembers its own call, for error messages.
"""

import contextlib
import hashlib
import importlib.util
import mmap
import os
import struct
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from ..transport.engine import Mismatch
from .failure import with_source

DETAIL = 160  # bytes of a call's arguments
FOR_EACH = 40  # and besides for each rank: two numbers, as an all-to-all has them
NAME, WHERE = 80, 240  # bytes of an axis' name; characters of the end of a file's name, with the line
FIELDS = 7
SLOTS = 64
COUNTS = 256
TRIES = 16  # entries in which a channel's count can be, one after the other
COUNT = struct.Struct("<II")  # checksum of a channel's name, calls begun there
_TORCH = importlib.util.find_spec("torch").submodule_search_locations[0]
_HERE = os.path.dirname(__file__)
_NOT_THE_CALLER = (_HERE, os.path.join(os.path.dirname(_HERE), "ranks"), _TORCH, contextlib.__file__)


@dataclass(frozen=True)
class Activity:
    """What one rank is doing: `since` is 0.0 while it is in no call; `calls` counts all calls so far.

    `channel` is set only if the rank's main thread is blocked until the call is done; `number` counts calls on it.
    """

    rank: int
    since: float
    calls: int
    op: str = ""
    axis: str = ""
    peers: tuple[int, ...] = ()
    number: int = 0
    detail: str = ""
    where: str = ""
    channel: int = 0


class Board:
    """The shared memory itself: of every rank a record, its last calls, and how many it has begun on each channel."""

    def __init__(self, path: Path, world: int, rank: int | None = None, create: bool = False):
        self.detail = DETAIL + FOR_EACH * world
        text = self.detail + NAME + WHERE + 60  # 60: the name of the call, two numbers, what separates all
        # version (odd while being written), start time, calls made, text with all peers
        self.record = struct.Struct(f"<QdQ{text + 8 * world}s")
        self.slot = struct.Struct(f"<Q{text}s")  # key of the call, the call with its arguments and line
        self.table = self.record.size + SLOTS * self.slot.size  # where a rank's counts begin
        self.size = self.table + COUNTS * COUNT.size  # bytes of one rank
        if create:
            Path(path).write_bytes(bytes(world * self.size))
        descriptor = os.open(path, os.O_RDWR)
        self.memory = mmap.mmap(descriptor, world * self.size)
        os.close(descriptor)
        self.world, self.rank = world, rank
        self.calls = 0
        self.text = b""
        self.lock = threading.Lock()

    def say(self, text: bytes, instead: int | None = None) -> int:
        """Publish that this rank starts a call, described by `text`; returns how many it has started.

        No-op where it has started another one since the one with number `instead`.
        """
        with self.lock:  # a background thread makes calls as well
            if instead not in (None, self.calls):
                return instead
            self.text, self.calls = text, self.calls + 1
            self.write(time.monotonic())
            return self.calls

    def write(self, since: float) -> None:
        """Publish this rank's record; a reader that sees an odd version tries again."""
        offset = self.rank * self.size
        (version,) = struct.unpack_from("<Q", self.memory, offset)
        struct.pack_into("<Q", self.memory, offset, version + 1)
        self.record.pack_into(self.memory, offset, version + 1, since, self.calls, self.text)
        struct.pack_into("<Q", self.memory, offset, version + 2)

    def read(self, rank: int) -> Activity:
        """The current record of `rank`."""
        for _ in range(100):
            before, since, calls, text = self.record.unpack_from(self.memory, rank * self.size)
            after = struct.unpack_from("<Q", self.memory, rank * self.size)[0]
            if before == after and before % 2 == 0:
                break
        parts = text.rstrip(b"\0").decode(errors="replace").split("\x1f")
        if len(parts) != FIELDS:
            return Activity(rank, 0.0, calls)
        op, axis, peers, number, channel, detail, where = parts
        ranks = tuple(int(peer) for peer in peers.split(",") if peer)
        return Activity(
            rank, since, calls, op, axis, ranks, int(number or 0), detail, where, int(channel or 0)
        )

    def note(self, key: int, text: bytes) -> None:
        """Store one call in this rank's history, over the one 64 calls before."""
        offset = self.rank * self.size + self.record.size + key % SLOTS * self.slot.size
        struct.pack_into("<Q", self.memory, offset, 0)
        self.slot.pack_into(self.memory, offset, 0, text)
        struct.pack_into("<Q", self.memory, offset, key)

    def noted(self, rank: int, key: int) -> str | None:
        """What `rank` has stored under a key; None before that call, and long after it."""
        offset = rank * self.size + self.record.size + key % SLOTS * self.slot.size
        found, text = self.slot.unpack_from(self.memory, offset)
        if found != key or struct.unpack_from("<Q", self.memory, offset)[0] != key:
            return None
        return text.rstrip(b"\0").decode(errors="replace")

    def count(self, channel: int, number: int) -> None:
        """Publish that this rank has begun call `number` on a channel."""
        if (entry := self._entry(self.rank, channel)) is not None:
            COUNT.pack_into(self.memory, entry, channel, number)

    def begun(self, rank: int, channel: int) -> int | None:
        """How many calls `rank` has begun on a channel; None where the table had no free entry for it."""
        entry = self._entry(rank, channel)
        return None if entry is None else COUNT.unpack_from(self.memory, entry)[1]

    def _entry(self, rank: int, channel: int) -> int | None:
        """Where a channel of a rank is counted, or will be; None where the entries that may have it are taken."""
        table = rank * self.size + self.table
        entries = (table + number % COUNTS * COUNT.size for number in range(channel, channel + TRIES))
        return next((e for e in entries if COUNT.unpack_from(self.memory, e)[0] in (0, channel)), None)

    def close(self) -> None:
        """Unmap the memory."""
        self.memory.close()


_board: Board | None = None
_mine: tuple | None = None  # without a board: this rank's call as (op, axis, peers, number, caller)


def attach(path: Path, rank: int, world: int) -> None:
    """Write this rank's calls to the board at `path` from now on."""
    global _board
    _board = Board(path, world, rank)


def enter(op, axis_name, peers, call_number, detail="", channel="", where="", instead=None):
    """Publish that this rank starts call `call_number` of `op` on an axis, with the global ranks `peers`.

    `channel` is given if the rank is blocked until the call is done, `where` if the call was made at another line than
    this one. Returns the entry; one that comes `instead` of another does so only while that one is the latest.
    """
    global _mine
    where = where or caller()
    if _board is None:
        if instead in (None, _mine):
            _mine = op, axis_name, tuple(peers), call_number, where
        return _mine
    blocked = channel and threading.current_thread() is threading.main_thread()
    code = str(zlib.crc32(channel.encode()) if blocked else 0)
    others = ",".join(map(str, peers)), str(call_number), code
    text = "\x1f".join((op, axis_name, *others, detail, where)).encode()
    if len(text) > _board.detail:  # a part of it may be too long
        detail, where = _fitted(detail, _board.detail), where[-WHERE:]
        text = "\x1f".join((op, _fitted(axis_name, NAME), *others, detail, where)).encode()
    return _board.say(text, instead)


def announce(channel: str, number: int, signature: str, axis_name: str, peers, agree=None) -> None:
    """Publish call `number` of a channel (a group, or a direction of a pair) and compare it with the peers' calls.

    Every rank writes before it reads, so of two that differ at least the later one notices and raises Mismatch.
    `agree(mine, theirs, peer)` replaces equality, for calls that match with different signatures.
    """
    if _board is None:
        return
    code = zlib.crc32(channel.encode())
    key = (code << 31) + number
    what, where = f"#{number} on axis {axis_name!r}", caller()
    text = "\x1f".join((signature, what, where)).encode()
    if len(text) > _board.detail:  # a part of it may be too long
        op, _, detail = signature.partition(" ")  # a send and its receive have the same detail
        signature = f"{op} {_fitted(detail, _board.detail)}"
        text = "\x1f".join((signature, _fitted(what, NAME), where[-WHERE:])).encode()
    _board.note(key, text)
    _board.count(code, number)
    for peer in peers:
        noted = _board.noted(peer, key)
        if noted is None:
            continue
        theirs, *rest = noted.split("\x1f")
        if not (agree(signature, theirs, peer) if agree else signature == theirs):
            mine = f"rank {_board.rank} calls {signature} {what}; {with_source(where)}"
            other = f"rank {peer} called {theirs} {'; '.join([rest[0], with_source(rest[-1])])}"
            why = "Ranks of one axis must make the same calls in the same order, with shapes that fit."
            raise Mismatch(f"Two ranks made calls that do not match:\n  {mine}\n  {other}\n{why}")


def _fitted(text: str, room: int) -> str:
    """A text; of one of more than `room` bytes its beginning and a digest: equal for equal texts only."""
    if len(data := text.encode()) <= room:
        return text
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return f"{data[: room - 36].decode(errors='ignore')}... {digest}"


def leave(entry=None) -> None:
    """Publish that the call is done; with an `entry`, unless another was made after it."""
    global _mine
    if entry is None or entry is _mine:
        _mine = None
    if _board is not None:
        with _board.lock:
            if entry in (None, _board.calls):
                _board.write(0.0)


def current_call() -> str:
    """The call that this rank is in, with its peers and its source line, for a rank without a board."""
    if _mine is None:
        return "a call of torch itself"
    op, axis_name, peers, number, frame = _mine
    others = f"rank{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"
    return f"{op} #{number} on axis {axis_name!r} with {others} ({with_source(frame)})"


def caller() -> str:
    """The file and line of the innermost frame outside torch (which runs backward), `ranks` and `processes`."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        frame = frame.f_back
    return "" if frame is None else f'File "{frame.f_code.co_filename}", line {frame.f_lineno}'
