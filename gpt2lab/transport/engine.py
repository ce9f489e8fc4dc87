"""The engine of one group on one rank: carries out what is under way, sleeps while nothing can go on, finds faults.

Calls go in lanes: what must keep its order (all collectives of the group; the sends to one rank; the receives from
one rank) is in one lane, and lanes go on independently, so a receive never stands in the way of a send. Whoever waits
for a call drives the engine himself, which costs no switch of threads; for calls that nobody waits for yet, a thread
of the engine's own drives. Nobody spins for long: a driver with nothing to do sleeps on the rank's bell.
"""

import math
import os
import threading
import time
from collections import deque

from torch.futures import Future

from . import semaphores
from .kinds import describe
from .stream import Misfit, Need

ALERT = 5e-5  # seconds before a driver sleeps, where every rank has a core: falling asleep and waking take as long
GLANCE = 0.1  # seconds after which a driver looks whether those it waits for still live


class PeerLost(RuntimeError):
    """A rank that this one waits for is gone, or says nothing for too long."""

    lost_peer = True


class Mismatch(RuntimeError):
    """Two ranks made calls that do not belong together; both are in the text."""


class Call:
    """One call under way: its steps, what it needs before the next, and how it ended.

    Its tensors live in its steps alone, which are gone when they are over. Whoever waited for the call is then the only
    one to hold them, and memory is free the moment he lets go.
    """

    def __init__(self, name: str, steps):
        self.name, self.steps = name, steps
        self.need: Need | None = None
        self.since = time.monotonic()  # when it went on for the last time
        self.ended = False  # nothing is left to do
        self.done = False  # and nobody but its caller holds anything of it
        self.error: Exception | None = None
        self.future: tuple[Future, list] | None = None  # who asked for one, with the tensors it is to give


class Engine:
    """Carries out the calls of one group on one rank.

    `names[r]` is what messages call rank r of the group, `crowd` is how many ranks this machine has to run.
    """

    def __init__(self, memory, rank: int, names: list[str], patience: float, crowd: int):
        self._memory, self._me, self._names, self._patience = memory, names[rank], names, patience
        self._bell = memory.bell(rank)
        self._alert = ALERT if crowd <= len(os.sched_getaffinity(0)) else 0.0
        self._changed = threading.Condition()
        self._lanes: dict[object, deque[Call]] = {}
        self._driven = self._closed = False
        self._looked = 0.0
        self._broken: Exception | None = None
        self._thread: threading.Thread | None = None

    def begin(self, lane, call: Call) -> None:
        """Start a call that nobody is about to wait for: it goes as far as it can, the rest beside."""
        if self._enter(lane, call):
            self._drive(lambda: True)

    def run(self, lane, call: Call) -> None:
        """Start a call and return when it is over; raises what went wrong in it."""
        if self._enter(lane, call):
            self._drive(lambda: call.done)
        self.wait(call)

    def wait(self, call: Call, seconds: float = math.inf) -> None:
        """Return when a call that was begun is over; raises what went wrong in it, and PeerLost after `seconds`."""
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
                f"{self._me} waited for {peer} in {call.name} for {seconds:.1f} s, as long as it was asked to."
            )
        if call.error is not None:
            raise call.error

    def future(self, call: Call, result: list) -> Future:
        """The call's end as a future of its result, which PyTorch's own code waits for."""
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

    def _enter(self, lane, call: Call) -> bool:
        """Put a call in its lane; whether the caller is the driver from now on."""
        with self._changed:
            if self._broken is not None:
                raise self._broken
            self._lanes.setdefault(lane, deque()).append(call)
            if self._driven:
                semaphores.post(self._bell)  # whoever drives looks at the new call
                return False
            self._driven = True
            return True

    def _drive(self, enough) -> None:
        """Carry out calls until there is `enough`; the caller has made itself the driver."""
        try:
            self._advance()
            while not enough():
                self._listen()
                self._advance()
                if time.monotonic() - self._looked > GLANCE:
                    self._look_around()
        finally:
            with self._changed:
                self._driven = False
                if self._lanes and self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._serve, name="shm", daemon=True)
                    self._thread.start()
                self._changed.notify_all()

    def _serve(self) -> None:
        """The engine's own thread: drives while there are calls and nobody else does."""
        while not self._closed:
            with self._changed:
                while (self._driven or not self._lanes) and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                self._driven = True
            self._drive(lambda: self._closed or not self._lanes)

    def _listen(self) -> None:
        """Return when the bell has rung, or after a while without it; a rank with a core of its own dozes off late."""
        end = time.perf_counter() + self._alert
        while not semaphores.take(self._bell):
            if time.perf_counter() >= end:
                semaphores.wait(self._bell, GLANCE)
                break
            os.sched_yield()
        while semaphores.take(self._bell):  # one look answers all the rings so far
            pass

    def _advance(self) -> None:
        """Let the first call of every lane go on as far as it can, then the next."""
        for lane, calls in list(self._lanes.items()):
            while calls and self._step(calls[0]):
                self._end(lane, calls)

    def _step(self, call: Call) -> bool:
        """Go on with a call while its needs are met; whether it is over."""
        try:
            while call.need is None or semaphores.take(call.need.semaphore):
                call.need = next(call.steps)
                call.since = time.monotonic()
            return False
        except StopIteration:
            return True
        except Misfit as misfit:
            call.error = Mismatch(self._explain(misfit))
        except Exception as error:
            call.error = error
        return True

    def _end(self, lane, calls: deque[Call]) -> None:
        """Take the first call of a lane out: it is over. After an error the group cannot be used any more."""
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

    def _look_around(self) -> None:
        """Fail a call that waits for a rank which is gone, or has waited too long."""
        self._looked = time.monotonic()
        for lane, calls in list(self._lanes.items()):
            call = next(iter(calls), None)
            if (
                call is None or call.need is None
            ):  # another thread is just putting it there, or a fault has ended it
                continue
            need, waited = call.need, time.monotonic() - call.since
            why = self._memory.gone(need.peer)
            if self._step(call):  # its last word may have come just before it went
                self._end(lane, calls)
            elif call.need is need and (why or waited > self._patience):
                peer, why = self._names[need.peer], why or "has not come"
                text = f"{peer} {why}, while {self._me} waited for it in {call.name} for {waited:.1f} s."
                call.error = PeerLost(text)
                self._end(lane, calls)
                return

    def _explain(self, misfit: Misfit) -> str:
        peer, theirs, bytes_there, mine, bytes_here = misfit.args
        return (
            f"{self._me} and {self._names[peer]} do not fit together: {describe(mine)} expects {bytes_here} bytes, "
            f"what came is {bytes_there} bytes of {describe(theirs)}. Ranks of a group must make the same calls in "
            f"the same order."
        )


def _resolve(call: Call, future: Future, result: list) -> None:
    if call.error is None:
        future.set_result(result)
    else:
        future.set_exception(call.error)
