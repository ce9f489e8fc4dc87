"""What happens around every call: compared with the peers', on the status board, paced, awaited, counted, logged.

A function of `comm.py` returns a `Call`: what this rank sends, and how it starts. The decorator above it makes the call
(`perform`), or, where nothing travels, gives back the value that the function returned instead.
"""

import contextlib
import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..machine.device_time import DeviceTime
from ..processes import status_board
from . import paced, refusals, unfinished
from .axis import Axis
from .traffic import RING, Event, log

_numbers: Counter = Counter()


def begun() -> int:
    """How many calls this rank has begun, of which those are in the log that it has waited for."""
    return sum(_numbers.values())


@dataclass
class Call:
    """One call as this rank makes it; `detail` must be the same text on every rank that takes part.

    `start(group=..., async_op=...)` begins it and returns torch's Work; the caller gets `finish(result)`, or `result`.
    This rank sends the messages `sends` of (target, bytes), or else `cost`, (bytes, messages), to its right neighbour;
    `ring`, the bytes of every rank's chunk, says the cost of an operation that is a ring. `pace` is (bytes, messages)
    that follow each other on the slowest link, by default `cost`; without messages in it the time is that of `sends`.
    A message from one rank to another has `pair` = (source, target). Targets and pairs are global ranks.
    """

    op: str
    axis: Axis
    detail: str
    start: Callable
    result: object = None
    finish: Callable | None = None
    ring: Sequence[int] = ()
    cost: tuple[int, int] = (0, 0)
    sends: tuple[tuple[int, int], ...] | None = None
    pace: tuple[int, int] | None = None
    pair: tuple[int, int] | None = None

    def __post_init__(self):
        if self.ring:
            self.cost = RING[self.op](self.ring, self.axis.rank)

    @property
    def peers(self) -> tuple[int, ...]:
        """The other ranks that take part."""
        mine = self.axis.ranks[self.axis.rank]
        return self.axis.peers if self.pair is None else tuple(r for r in self.pair if r != mine)

    @property
    def channel(self) -> str:
        """The name of the sequence that this call is in: a process group, or one direction of a pair of its ranks."""
        group = getattr(self.axis.group, "group_name", "world")
        return group if self.pair is None else f"{group} {self.pair[0]}>{self.pair[1]}"

    def event(self, start: float, ended) -> Event:
        """What the log records."""
        axis, name = self.axis, self.axis.name
        if self.sends is None:
            to = axis.ranks[(axis.rank + 1) % axis.size]
            targets = ((to, self.cost[0]),) if self.cost[0] else ()
            return Event(self.op, name, *self.cost, start, ended, targets, axis.ranks)
        size, targets = sum(size for _, size in self.sends), tuple(s for s in self.sends if s[1])
        return Event(self.op, name, size, len(self.sends), start, ended, targets, (), self.pair)


class Handle:
    """An operation in progress; `wait()` returns its result and logs it."""

    def __init__(self, call: Call | None, number: int = 0, result=None):
        self._call, self._number, self._work = call, number, None
        self._result = result if call is None else call.result
        one = self._result[0] if isinstance(self._result, list) and self._result else self._result
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
        if (call := self._call) is not None:
            if self._work is not None:
                self._work.wait()
                if self._now is DeviceTime:  # the host goes on at once
                    what = call.op, call.axis.name, call.peers, self._number, call.detail, ""
                    enter = functools.partial(status_board.enter, *what, status_board.caller())
                    unfinished.keep(self._work, enter)
            log.append(call.event(self._start, self._paced(call, self._done or self._now())))
            self._call = None
            if call.finish is not None:
                self._result = call.finish(self._result)
        return self._result

    def _paced(self, call: Call, end):
        """When a collective is over: on the paced network, if there is one, for which this rank sleeps."""
        if paced.slower is None or call.pair is not None:
            return end
        due = paced.delay(call.axis.ranks, call.axis.rank, end, *(call.pace or call.cost), call.sends or ())
        time.sleep(max(0.0, due - time.perf_counter()))
        return due

    def announce(self, why: str = "", blocked: bool = True) -> None:
        """Tell the board that this rank is in the operation; `blocked`: and does nothing else until it is done."""
        if (call := self._call) is not None:
            channel = call.channel if blocked else ""
            status_board.enter(call.op, call.axis.name, call.peers, self._number, call.detail + why, channel)

    def withdraw(self) -> None:
        """Tell the board that this rank goes on."""
        unfinished.show_oldest() if unfinished.calls else status_board.leave()

    def waits_for(self) -> str:
        """The operation and for whom it waits, in words."""
        if (call := self._call) is None:
            return "nobody"
        return f"{call.op} #{self._number} on axis {call.axis.name!r} with rank {', '.join(map(str, call.peers))}"

    def note_completion(self, _=None) -> None:
        """Record when the operation ended; the backend's thread calls this, perhaps long before `wait`.

        On a GPU nobody does: there it ends when what comes after `wait` on the GPU could go on.
        """
        self._done = self._now()


def finished(result, async_op: bool = False):
    """The result of a call in which nothing travels; as a Handle with `async_op`."""
    return Handle(None, result=result) if async_op else result


def perform(call: Call, async_op: bool = False):
    """Make a call. Raises Mismatch, before any data moves, when a peer has already made another one at this place."""
    axis = call.axis
    _numbers[call.channel] += 1
    number = _numbers[call.channel]
    agree = lambda mine, theirs, peer: _fit(mine, theirs, axis.rank, axis.ranks.index(peer))
    status_board.announce(call.channel, number, f"{call.op} {call.detail}", axis.name, call.peers, agree)
    handle = Handle(call, number)
    handle.announce(blocked=not async_op)
    on_gpu = handle._now is DeviceTime  # there torch gives a Work, which tells of a hang, only for async_op
    handle._work = call.start(group=axis.group, async_op=async_op or on_gpu)
    call.start = None  # it refers to what is sent, whose memory the backend holds as long as it needs it
    if not async_op:
        return handle.wait()
    if call.pair is None and not on_gpu:
        # On a GPU a callback would run on a stream of the pool that the communicators use too, and hold one of them up.
        with contextlib.suppress(AttributeError, RuntimeError):  # gloo's reduce-scatter has no future
            handle._work.get_future().add_done_callback(handle.note_completion)
    handle.withdraw()
    return handle


def _fit(mine: str, theirs: str, rank: int, peer: int) -> bool:
    """Whether two ranks' calls match: equal, or a send and its receive, or all-to-alls that agree on both parts."""
    if not mine.startswith(("send", "recv", "all_to_all")):
        return mine == theirs
    ours, others = mine.split(), theirs.split()
    if ours[0] != "all_to_all":
        return {ours[0], others[0]} == {"send", "recv"} and ours[1:] == others[1:]
    if ours[:2] != others[:2]:
        return False
    counts = [[int(n) for n in words.split(",")] for words in (*ours[2:], *others[2:])]
    return counts[0][peer] == counts[3][rank] and counts[1][peer] == counts[2][rank]


class Exchange:
    """A message that comes and one that leaves, in progress; `wait()` returns what came."""

    def __init__(self, coming: Handle, going: Handle):
        self._coming, self._going = coming, going

    def wait(self):
        """Block until both are over."""
        came = self._coming.wait()
        self._going.wait()
        return came


def forward_only(instead: str = "", starts: bool = False):
    """Above a call that has no backward: a tensor that needs one is refused, with what to use `instead` (if named).

    With `async_op=True`, the default of one that only `starts`, it gives a Handle, whose `wait()` gives the result.
    What is wrong with the arguments of a call that failed is said in a ValueError; one that works pays nothing for it.
    """

    def wrap(make):
        @functools.wraps(make)
        def call(*args, async_op: bool = starts, **options):
            try:
                if instead and _needs_grad(args[0] if args else options.get("x")):
                    own = f"{make.__name__} has no backward of its own"
                    raise ValueError(f"{own}. Use {instead}, or detach the tensor.")
                made = make(*args, **options)
                if isinstance(made, Call):
                    return perform(made, async_op)
                if isinstance(made, Exchange):
                    return made if async_op else made.wait()
                return finished(made, async_op)
            except (AttributeError, IndexError, TypeError, RuntimeError) as error:
                if why := refusals.reason(make, args, options, error):
                    raise ValueError(f"{make.__name__}: {why}") from error
                raise

        return call

    return wrap


def adjoint(backward, alone: bool = True):
    """Above a call (x, axis, ...): what its gradient does on the way back, `backward(grad, shape of x, axis, ...)`.

    So it is differentiable, except with `async_op=True`. Where x is a list of tensors, so are grad and shape. On an
    axis of one rank the call gives x as it is, except with `alone=False`.
    """

    def wrap(make):
        plain = forward_only(f"{make.__name__} without async_op")(make)
        first = next(iter(inspect.signature(make).parameters))

        class Pair(torch.autograd.Function):
            @staticmethod
            def forward(ctx, many, given, options, *xs):
                ctx.many, ctx.given, ctx.options, ctx.shapes = many, given, options, [x.shape for x in xs]
                return tuple(plain(xs, *given, **options)) if many else plain(*xs, *given, **options)

            @staticmethod
            def backward(ctx, *grads):
                if ctx.many:
                    return None, None, None, *backward(grads, ctx.shapes, *ctx.given, **ctx.options)
                return None, None, None, backward(*grads, *ctx.shapes, *ctx.given, **ctx.options)

        @functools.wraps(make)
        def call(x, axis, *given, async_op: bool = False, **options):
            many = isinstance(x, list | tuple)
            if alone and isinstance(axis, Axis) and axis.size == 1:
                return finished(list(x) if many else x, async_op)
            if async_op or not _needs_grad(x):
                return plain(x, axis, *given, async_op=async_op, **options)
            y = Pair.apply(many, (axis, *given), options, *(x if many else [x]))
            return list(y) if many else y

        @functools.wraps(make)
        def named(*args, **options):
            return call(options.pop(first), *args, **options) if first in options else call(*args, **options)

        return call if first == "x" else named

    return wrap


def _needs_grad(x) -> bool:
    """Whether a backward would reach what a call is given: a tensor, or several."""
    every = x if isinstance(x, list | tuple) else [x]
    return torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in every)
