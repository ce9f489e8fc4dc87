"""Paced messages: real messages between real ranks, each delayed to the latency and bandwidth of a slower network.

`with paced.use(Network(...)):` on every rank. A message waits until its link is free, then takes latency + bytes /
bandwidth; the ranks sleep meanwhile, so that overlap and topology can be seen on any laptop. Numbers made this way are
called "paced" wherever they are shown.
"""

import math
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager

from ..machine.arguments import checked
from ..machine.links import Link, Network

__all__ = ["Link", "Network", "delay", "deliver", "use"]

slower: Network | None = None
"""The network that messages are delayed to, inside of `use`."""
_free_at = 0.0  # when this rank's last collective ends on the paced network
_queues: dict[int, "_Queue"] = {}


@checked()
@contextmanager
def use(network: Network | Link | None):
    """Delay every message inside the block as this network would; None: no delay."""
    global slower
    before, slower = slower, Network(network) if isinstance(network, Link) else network
    try:
        yield
    finally:
        slower = before


def delay(ranks, rank: int, done: float, size: int, messages: int, sends=()) -> float:
    """When a collective that really ended at `done` ends on the paced network.

    It is `messages` steps of a ring over the global `ranks`, in which each rank sends `size` bytes; with no messages,
    the direct messages `sends` of (target, bytes).
    """
    global _free_at
    if sends and not messages:
        seconds = sum(slower.link(ranks[rank], target).time(part) for target, part in sends)
    else:
        seconds = slower.ring_time(ranks, size, messages)
    _free_at = max(float(done), _free_at) + seconds
    return _free_at


def deliver(source: int, target: int, size: int, start):
    """Start a message by `start()`, which returns a Work: now, or when it would have arrived on the paced network.

    None starts before an earlier one to the same rank, also where that one is paced and this one is not.
    """
    if slower is None and (target not in _queues or _queues[target].last.started.done()):
        return start()
    if target not in _queues:
        _queues[target] = _Queue()
    link = slower.link(source, target) if slower else Link(0.0, math.inf)
    return _queues[target].put(link, size, start)


class _Queue:
    """The messages to one peer, and a thread that starts one after the other when it is due."""

    def __init__(self):
        self.free_at = 0.0
        self.waiting = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, link: Link, size: int, start) -> "_Delayed":
        now = time.perf_counter()
        # the link is busy while the bytes pass; the latency of one message overlaps the bytes of the next
        self.free_at = max(now, self.free_at) + size / link.bandwidth
        work = _Delayed()
        self.last = work
        self.waiting.put((self.free_at + link.latency, start, work))
        return work

    def _run(self):
        while True:
            due, start, work = self.waiting.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            try:
                work.started.set_result(start())
            except Exception as error:
                work.started.set_exception(error)


class _Delayed:
    """The Work of a message that will be started later."""

    def __init__(self):
        self.started = Future()

    def wait(self) -> None:
        self.started.result().wait()

    def is_completed(self) -> bool:
        return self.started.done() and self.started.result().is_completed()
