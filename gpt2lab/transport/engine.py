"""The progress engine of one group on one rank: runs its requests, sleeps while none can continue, finds faults.

Requests are queued in lanes: those that must keep their order (all collectives of the group; the sends to one
rank; the receives from one rank) are in one lane, and lanes progress independently, so a receive never blocks a
send. A thread that waits for a request drives the engine itself, which saves a switch of threads; requests that no
thread waits for are driven by a thread of the engine. A driver that cannot continue spins for a moment, then
sleeps on a semaphore. `SharedMemoryWork` is the handle of a request for torch.
"""

import math
import os
import threading
import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.futures import Future

from . import semaphores
from .kinds import kind_name
from .stream import Need, UnexpectedDelivery

SPIN = 5e-5  # seconds that a driver spins before it sleeps when ranks <= cores: waking up takes as long
CHECK_EVERY = 0.1  # seconds between a driver's checks whether the ranks that it waits for are alive


class PeerLost(RuntimeError):
    """A rank that this one waits for is gone, or has not answered for too long."""

    lost_peer = True


class Mismatch(RuntimeError):
    """Two ranks of a group made different calls at the same position; both are in the text."""


class Request:
    """One call in progress: its steps (a generator), what it needs before the next step, and how it ended.

    Only the steps refer to its tensors, and a finished generator refers to nothing: so the memory is free as soon as
    the caller drops them.
    """

    def __init__(self, name: str, steps):
        self.name, self.steps = name, steps
        self.need: Need | None = None
        self.since = time.monotonic()  # time of its last progress
        self.ended = False  # no step is left
        self.done = False  # ended, and its future is resolved
        self.error: Exception | None = None
        self.future: tuple[Future, list] | None = None  # if one was requested, with the tensors of its result


class ProgressEngine:
    """Runs the requests of one group on one rank.

    `names[r]` is the name of rank r of the group in messages, `timeout` is in seconds, `local_ranks` is the number of
    ranks on this machine.
    """

    def __init__(self, memory, rank: int, names: list[str], timeout: float, local_ranks: int):
        self._memory, self._me, self._names, self._timeout = memory, names[rank], names, timeout
        self._wakeup = memory.wakeup(rank)
        self._spin = SPIN if local_ranks <= len(os.sched_getaffinity(0)) else 0.0
        self._changed = threading.Condition()
        self._lanes: dict[object, deque[Request]] = {}
        self._driven = self._closed = False
        self._checked = 0.0
        self._broken: Exception | None = None
        self._thread: threading.Thread | None = None

    def begin(self, lane, call: Request) -> None:
        """Start a request and return: it runs as far as it can now, the rest later."""
        if self._enter(lane, call):
            self._drive(lambda: True)

    def run(self, lane, call: Request) -> None:
        """Start a request and return when it is done; raises its error."""
        if self._enter(lane, call):
            self._drive(lambda: call.done)
        self.wait(call)

    def wait(self, call: Request, seconds: float = math.inf) -> None:
        """Return when a request is done; raises its error, and PeerLost after `seconds`."""
        if call.done and call.error is None:
            return
        end = time.monotonic() + seconds
        enough = lambda: call.done or time.monotonic() > end
        while not enough():
            with self._changed:
                while self._driven and not enough():
                    self._changed.wait(min(end - time.monotonic(), threading.TIMEOUT_MAX))
                if enough():
                    break
                self._driven = True
            self._drive(enough)
        if not call.done:
            peer = self._names[call.need.peer] if call.need else "another call"
            raise PeerLost(
                f"{self._me} waited for {peer} in {call.name} for {seconds:.1f} s, the timeout of this wait."
            )
        if call.error is not None:
            raise call.error

    def future(self, call: Request, result: list) -> Future:
        """A future of the request's result, for PyTorch's own code."""
        with self._changed:
            if not call.ended:
                call.future = call.future or (Future(), result)
                return call.future[0]
        future = Future()
        _resolve(call, future, result)
        return future

    def close(self) -> None:
        """End the engine's thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _enter(self, lane, call: Request) -> bool:
        """Put a request into its lane; returns whether the calling thread is the driver from now on."""
        with self._changed:
            if self._broken is not None:
                raise self._broken
            self._lanes.setdefault(lane, deque()).append(call)
            if self._driven:
                semaphores.post(self._wakeup)  # so that the driver looks at the new request
                return False
            self._driven = True
            return True

    def _drive(self, enough) -> None:
        """Run requests until `enough()`; the calling thread must be the driver."""
        try:
            self._advance()
            while not enough():
                self._sleep()
                self._advance()
                if time.monotonic() - self._checked > CHECK_EVERY:
                    self._check_peers()
        finally:
            with self._changed:
                self._driven = False
                if self._lanes and self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._serve, name="shm", daemon=True)
                    self._thread.start()
                self._changed.notify_all()

    def _serve(self) -> None:
        """The engine's thread: drives while there are requests and no other driver."""
        while not self._closed:
            with self._changed:
                while (self._driven or not self._lanes) and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                self._driven = True
            self._drive(lambda: self._closed or not self._lanes)

    def _sleep(self) -> None:
        """Wait until another thread or rank posts `wakeup`, at most CHECK_EVERY; spin first when ranks <= cores."""
        end = time.perf_counter() + self._spin
        while not semaphores.take(self._wakeup):
            if time.perf_counter() >= end:
                semaphores.wait(self._wakeup, CHECK_EVERY)
                break
            os.sched_yield()
        while semaphores.take(self._wakeup):  # one look at all lanes answers every post so far
            pass

    def _advance(self) -> None:
        """Run the first request of every lane as far as possible, then the next."""
        for lane, calls in list(self._lanes.items()):
            while calls and self._step(calls[0]):
                self._end(lane, calls)

    def _step(self, call: Request) -> bool:
        """Run a request while its needs are met; returns whether it has ended."""
        try:
            while call.need is None or semaphores.take(call.need.semaphore):
                call.need = next(call.steps)
                call.since = time.monotonic()
            return False
        except StopIteration:
            return True
        except UnexpectedDelivery as delivery:
            call.error = Mismatch(self._explain(delivery))
        except Exception as error:
            call.error = error
        return True

    def _end(self, lane, calls: deque[Request]) -> None:
        """Remove the first request of a lane, which has ended; after an error the group cannot be used any more."""
        with self._changed:
            call = calls.popleft()
            if not calls:
                del self._lanes[lane]
            ended = [call]
            if call.error is not None:
                self._broken = call.error
                for others in self._lanes.values():
                    ended += others
                    others.clear()
                self._lanes.clear()
            for over in ended:
                over.ended, over.error = True, call.error
        for over in ended:
            if over.future is not None:
                _resolve(over, *over.future)
                over.future = None
        with self._changed:
            for over in ended:
                over.done = True
            self._changed.notify_all()

    def _check_peers(self) -> None:
        """Fail a request that waits for a rank that is gone, or has waited too long."""
        self._checked = time.monotonic()
        for lane, calls in list(self._lanes.items()):
            call = next(iter(calls), None)
            if call is None or call.need is None:  # ended by a fault, or just being added by another thread
                continue
            need, waited = call.need, time.monotonic() - call.since
            why = self._memory.gone(need.peer)
            if self._step(call):  # the peer may have delivered just before it left
                self._end(lane, calls)
            elif call.need is need and (why or waited > self._timeout):
                peer, why = self._names[need.peer], why or "has not come"
                text = f"{peer} {why}, while {self._me} waited for it in {call.name} for {waited:.1f} s."
                call.error = PeerLost(text)
                self._end(lane, calls)
                return

    def _explain(self, delivery: UnexpectedDelivery) -> str:
        peer, theirs, bytes_there, mine, bytes_here = delivery.args
        return (
            f"{self._me} and {self._names[peer]} made calls that do not match: {kind_name(mine)} expects {bytes_here} "
            f"bytes but received {bytes_there} bytes of {kind_name(theirs)}. Ranks of a group must make the same calls "
            f"in the same order."
        )


def _resolve(call: Request, future: Future, result: list) -> None:
    if call.error is None:
        future.set_result(result)
    else:
        future.set_exception(call.error)


class SharedMemoryWork(dist.Work):
    """A request that was begun. It refers to the call's tensors: their memory is free once this object is."""

    def __init__(self, engine: ProgressEngine, request: Request, result: list, inputs: list):
        super().__init__()
        self._engine, self._call, self._result, self._inputs = engine, request, result, inputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the call is done; raises its error, and PeerLost after `timeout`, if one is given."""
        self._engine.wait(self._call, timeout.total_seconds() if timeout else math.inf)
        return True

    def is_completed(self) -> bool:
        """Whether the call is done."""
        return self._call.done

    def is_success(self) -> bool:
        """Whether the call is done and has no error."""
        return self._call.done and self._call.error is None

    def exception(self) -> Exception | None:
        """The error of the call, or None."""
        return self._call.error

    def get_future(self):
        """A future of the resulting tensors."""
        return self._engine.future(self._call, self._result)

    def result(self) -> list[torch.Tensor]:
        """The resulting tensors."""
        return self._result
