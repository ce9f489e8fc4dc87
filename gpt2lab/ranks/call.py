"""What happens around every call: announced on the status board, compared with the peers', paced, awaited, logged.

What was wrong with the arguments of a call that failed is said in one sentence; one that works pays nothing for it.
"""

import contextlib
import functools
import inspect
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import torch

from ..machine.device_time import DeviceTime
from ..processes import status_board
from . import paced
from .mesh import Axis
from .traffic import Event, log

POSITIONS = ("root", "to", "source")
_numbers: Counter = Counter()


@dataclass(frozen=True)
class Call:
    """One call as this rank makes it; `detail` must be the same text on every rank that takes part.

    `bytes` and `messages` are what this rank sends: in the direct messages `sends` of (target, bytes), or else to its
    right neighbour. `pace` is (bytes, messages) that follow each other on the slowest link of the axis, from which
    `paced` computes the time (without messages in it: from `sends`). A message from one rank to another has `pair` =
    (source, target). Targets and pairs are global ranks.
    """

    op: str
    axis: Axis
    detail: str
    bytes: int = 0
    messages: int = 0
    pace: tuple[int, int] = (0, 0)
    sends: tuple = ()
    pair: tuple[int, int] | None = None

    @classmethod
    def ring(cls, op: str, axis: Axis, detail: str, cost: tuple, pace: tuple | None = None) -> "Call":
        """A call whose messages go to the right neighbour: `cost` is (bytes, messages); `pace` by default the same."""
        return cls(op, axis, detail, *cost, pace or cost)

    @classmethod
    def direct(cls, op: str, axis: Axis, detail: str, sends: tuple, pace: tuple = (0, 0)) -> "Call":
        """A call that sends each message of `sends` straight to its target."""
        return cls(op, axis, detail, sum(size for _, size in sends), len(sends), pace, sends)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks that take part."""
        mine = self.axis.ranks[self.axis.rank]
        return self.axis.peers if self.pair is None else tuple(r for r in self.pair if r != mine)

    @property
    def event(self) -> dict:
        """What the log records of the call, besides its times."""
        right = self.axis.ranks[(self.axis.rank + 1) % self.axis.size]
        direct = self.sends if self.pair is None else ((self.pair[1], self.bytes),)
        targets = (direct or ((right, self.bytes),)) if self.bytes else ()
        sent = {"op": self.op, "axis": self.axis.name, "bytes": self.bytes, "messages": self.messages}
        return sent | {"targets": targets, "ring": () if direct else self.axis.ranks, "pair": self.pair}

    @property
    def channel(self) -> str:
        """The name of the sequence that this call is in: a process group, or one direction of a pair of its ranks."""
        group = getattr(self.axis.group, "group_name", "world")
        return group if self.pair is None else f"{group} {self.pair[0]}>{self.pair[1]}"


class Handle:
    """An operation in progress; `wait()` returns its result and logs it."""

    def __init__(self, call: Call | None, number: int, work: Sequence, result, finish=None):
        self._call, self._number, self._work = call, number, work
        self._result, self._finish = result, finish
        one = result[0] if isinstance(result, list) and result else result
        self._now = DeviceTime if getattr(one, "is_cuda", False) else time.perf_counter
        self._start, self._done = time.perf_counter(), 0.0

    def wait(self):
        """Block until the operation is done; returns what the call would return without async_op."""
        if self._call is not None:
            self.announce()
            self.join()
            self.withdraw()
        return self._result

    def join(self):
        """What `wait` does, unannounced: for a thread beside the one that makes the calls."""
        if self._call is not None:
            for work in self._work:
                work.wait()
            self._end(self._call)
            self._call = None
            if self._finish is not None:
                self._result = self._finish(self._result)
        return self._result

    def announce(self, why: str = "") -> None:
        """Tell the board that this rank does nothing else until the operation is done."""
        if (call := self._call) is not None:
            detail = call.detail + why
            status_board.enter(call.op, call.axis.name, call.peers, self._number, detail, call.channel)

    def withdraw(self) -> None:
        """Tell the board that this rank goes on."""
        status_board.leave()

    def waits_for(self) -> str:
        """The operation and for whom it waits, in words."""
        if (call := self._call) is None:
            return "nobody"
        return f"{call.op} #{self._number} on axis {call.axis.name!r} with rank {', '.join(map(str, call.peers))}"

    def _end(self, call: Call) -> None:
        end = self._done or self._now()
        if call.pair is None and paced.slower is not None:
            due = paced.delay(call.axis.ranks, call.axis.rank, end, *call.pace, call.sends)
            if due is not end:
                time.sleep(max(0.0, due - time.perf_counter()))
                end = due
        log.append(Event(start=self._start, ended=end, **call.event))

    def note_completion(self, _=None) -> None:
        """Record when the operation ended; the backend's thread calls this, perhaps long before `wait`.

        NCCL calls it at once, on a stream that waits for nothing but the operation.
        """
        self._done = self._now()


class Done:
    """The Work of a call that is complete when it returns."""

    def __init__(self, _=None):
        pass

    def wait(self) -> None:
        """No-op."""


def finished(result, async_op: bool = False):
    """The result of a call on an axis of one rank, where it is the identity; as a Handle with `async_op`."""
    return Handle(None, 0, (), result) if async_op else result


def perform(call: Call, start, result, async_op: bool = False, finish=None):
    """Make a call: `start(async_op)` begins it; `finish(result)` is what the caller gets in the end.

    `start(True)` returns a Work; `start(False)` may return when the call is complete. Raises Mismatch, before any data
    moves, when a peer has already made a different call at this position of the sequence.
    """
    _numbers[call.channel] += 1
    number = _numbers[call.channel]
    agree = lambda mine, theirs, peer: _fit(mine, theirs, call.axis.rank, call.axis.ranks.index(peer))
    status_board.announce(call.channel, number, f"{call.op} {call.detail}", call.axis.name, call.peers, agree)
    status_board.enter(
        call.op, call.axis.name, call.peers, number, call.detail, "" if async_op else call.channel
    )
    handle = Handle(call, number, (), result, finish)
    work = start(async_op) or Done()
    handle._work = (work,)
    if not async_op:
        return handle.wait()
    if call.pair is None or handle._now is DeviceTime:
        with contextlib.suppress(AttributeError, RuntimeError):  # gloo's reduce-scatter has no future
            work.get_future().add_done_callback(handle.note_completion)
    status_board.leave()
    return handle


def _fit(mine: str, theirs: str, rank: int, peer: int) -> bool:
    """Whether two ranks' calls match: equal, or a send and its receive, or all-to-alls that agree on both parts."""
    if mine == theirs:
        return not mine.startswith(("send", "recv"))
    ours, others = mine.split(), theirs.split()
    if {ours[0], others[0]} == {"send", "recv"}:
        return ours[1:] == others[1:]
    if ours[0] == others[0] == "all_to_all" and ours[1] == others[1]:
        counts = [[int(n) for n in words.split(",")] for words in (*ours[2:], *others[2:])]
        return counts[0][peer] == counts[3][rank] and counts[1][peer] == counts[2][rank]
    return False


def shape_and_dtype(x: torch.Tensor) -> str:
    """Shape and dtype, as shown in messages: `(3, 4) float64`."""
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def explained(call):
    """The call; where it cannot work with what it was given, a ValueError says why."""

    @functools.wraps(call)
    def told(*args, **kwargs):
        try:
            return call(*args, **kwargs)
        except (AttributeError, IndexError, TypeError, RuntimeError) as error:
            why = _wrong(inspect.signature(call), args, kwargs)
            if not why and "pickle" in str(error):
                why = f"{error}. Send numbers, strings, tensors, or lists and dicts of them."
            if not why:
                raise
            raise ValueError(f"{call.__name__}: {why}") from error

    return told


def _wrong(signature, args, kwargs) -> str:
    """What is wrong; empty where the call failed for another reason."""
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:  # Python has said what is missing
        return ""
    axis = given.get("axis")
    if not isinstance(axis, Axis):
        return (
            f"axis={axis!r} is a {type(axis).__name__}, not an axis. Use one of a mesh, such as mesh['dp']."
        )
    for name in ("x", "like", "shard"):
        if name in given and not isinstance(given[name], torch.Tensor):
            kind = type(given[name]).__name__
            return f"{name} is a {kind}, not a tensor. Use torch.tensor(...)."
    if not all(isinstance(part, torch.Tensor) for part in given.get("parts", ())):
        return f"its parts are no tensors. Use {axis.size}, one per rank."
    for name in POSITIONS:
        if name in given and not _index(given[name], axis.size):
            return f"{name}={given[name]!r} is no position on axis {axis.name!r}. Use 0 to {axis.size - 1}."
    return _wrong_cut(given.get("x"), axis, given.get("dim", 0), given.get("sizes"))


def _wrong_cut(x, axis: Axis, dim, sizes) -> str:
    """What is wrong with how a tensor is cut along a dimension."""
    if x is None:
        return ""
    if not _index(dim, x.dim()):
        least = f"Use 0 to {x.dim() - 1}" if x.dim() else "Use x.view(1)"
        return f"dim={dim!r} is no dimension of a tensor of shape {tuple(x.shape)}. {least}."
    if sizes is None or all(isinstance(n, Integral) and n >= 0 for n in sizes):
        return ""  # the call itself has compared them with the tensor
    return (
        f"sizes={list(sizes)} do not fit length {x.size(dim)} on {axis.size} ranks. Use one length per rank."
    )


def _index(value, length: int) -> bool:
    return isinstance(value, Integral) and -length <= value < length
