"""The gate that every call passes: announced on the board, compared with its peers, paced, waited for, and logged."""

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..processes import status_board
from . import paced
from .mesh import Axis
from .traffic import Event, log

_numbers: Counter = Counter()


@dataclass(frozen=True)
class Call:
    """One call as this rank makes it; `detail` must be the same text on every rank that takes part.

    `bytes` and `messages` are what this rank sends: as direct messages, `legs` of (target, bytes), or else to its right
    neighbour. `size` and `hops` are those of the whole ring (without hops the legs decide how long paced links take).
    A message has the direction `ways` = (source, target); all these are global ranks.
    """

    op: str
    axis: Axis
    detail: str
    bytes: int = 0
    messages: int = 0
    size: int = 0
    hops: int = 0
    legs: tuple = ()
    ways: tuple[int, int] | None = None

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks that take part."""
        mine = self.axis.ranks[self.axis.rank]
        return self.axis.peers if self.ways is None else tuple(r for r in self.ways if r != mine)

    @property
    def event(self) -> dict:
        """What the log keeps of the call, besides its times."""
        right = self.axis.ranks[(self.axis.rank + 1) % self.axis.size]
        direct = self.legs if self.ways is None else ((self.ways[1], self.bytes),)
        targets = (direct or ((right, self.bytes),)) if self.bytes else ()
        sent = {"op": self.op, "axis": self.axis.name, "bytes": self.bytes, "messages": self.messages}
        return sent | {"targets": targets, "ring": () if direct else self.axis.ranks}

    @property
    def channel(self) -> str:
        """What orders this call: a process group, or a group and one direction of one pair in it."""
        group = getattr(self.axis.group, "group_name", "world")
        return group if self.ways is None else f"{group} {self.ways[0]}>{self.ways[1]}"


class Handle:
    """An operation under way; `wait()` returns its result and logs it."""

    def __init__(self, call: Call | None, number: int, work: Sequence, result, finish=None):
        self._call, self._number, self._work = call, number, work
        self._result, self._finish = result, finish
        self._start, self._done = time.perf_counter(), 0.0

    def wait(self):
        """Block until the operation is done; returns what the call returns without async_op."""
        if self._call is not None:
            call, self._call = self._call, None
            status_board.enter(call.op, call.axis.name, call.peers, self._number, call.detail, call.channel)
            for work in self._work:
                work.wait()
            self._end(call)
            status_board.leave()
            if self._finish is not None:
                self._result = self._finish(self._result)
        return self._result

    def _end(self, call: Call) -> None:
        end = self._done or time.perf_counter()
        if call.ways is None:
            due = paced.delay(call.axis.ranks, call.axis.rank, end, call.size, call.hops, call.legs)
            time.sleep(max(0.0, due - time.perf_counter()))
            end = max(end, due)
        log.append(Event(start=self._start, end=end, **call.event))

    def note_completion(self, _=None) -> None:
        """Called from the backend's thread when the operation is done, perhaps long before anybody waits."""
        self._done = time.perf_counter()


class Done:
    """The Work of a call that is over when it returns."""

    def __init__(self, _=None):
        pass

    def wait(self) -> None:
        """Nothing is left to wait for."""


def finished(result, async_op: bool = False):
    """The result of a call on one rank, which has nothing to do; as a Handle where one is expected."""
    return Handle(None, 0, (), result) if async_op else result


def perform(call: Call, start, result, async_op: bool = False, finish=None):
    """Make a call: `start(async_op)` begins it; `finish(result)` is what the caller gets in the end.

    `start(True)` returns a Work; a call that is waited for at once may be over when `start(False)` returns.
    Raises board.Mismatch, before any data moves, when a peer has already made another call in this place.
    """
    _numbers[call.channel] += 1
    number = _numbers[call.channel]
    places = {rank: place for place, rank in enumerate(call.axis.ranks)}
    agree = lambda mine, theirs, peer: _fit(mine, theirs, call.axis.rank, places[peer])
    status_board.post(call.channel, number, f"{call.op} {call.detail}", call.axis.name, call.peers, agree)
    status_board.enter(
        call.op, call.axis.name, call.peers, number, call.detail, "" if async_op else call.channel
    )
    handle = Handle(call, number, (), result, finish)
    work = start(async_op) or Done()
    handle._work = (work,)
    if not async_op:
        return handle.wait()
    if call.ways is None:
        with contextlib.suppress(AttributeError, RuntimeError):  # gloo's reduce-scatter has no future
            work.get_future().add_done_callback(handle.note_completion)
    status_board.leave()
    return handle


def _fit(mine: str, theirs: str, place: int, peer: int) -> bool:
    """Whether two ranks' calls belong together: equal; or a send and its receive; or parts that are expected."""
    if mine == theirs:
        return not mine.startswith(("send", "recv"))
    ours, others = mine.split(), theirs.split()
    if {ours[0], others[0]} == {"send", "recv"}:
        return ours[1:] == others[1:]
    if ours[0] == others[0] == "all_to_all" and ours[1] == others[1]:
        counts = [[int(n) for n in words.split(",")] for words in (*ours[2:], *others[2:])]
        return counts[0][peer] == counts[3][place] and counts[1][peer] == counts[2][place]
    return False


def describe(x: torch.Tensor) -> str:
    """Shape and dtype, as shown in messages: `(3, 4) float64`."""
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
