"""Paced links: real messages between real ranks, each held back to the latency and bandwidth of a slower network.

`with network.links(Links(...)):` on every rank. A message on a link waits until the link is free, then takes
latency + bytes / bandwidth; the ranks do nothing meanwhile, so overlap and topology show on any laptop. Numbers made
this way are called "paced" wherever they are shown.
"""

import queue
import threading
import time
from contextlib import contextmanager

from ..planner.links import Link, Links

__all__ = ["Link", "Links", "delay", "links", "send"]

_links: Links | None = None
_free_at = 0.0  # when this rank's side of the network has finished its last collective
_lanes: dict[int, "_Lane"] = {}


@contextmanager
def links(table: Links | Link | None):
    """Hold every message inside the block back to these links; None lets them run free."""
    global _links
    before, _links = _links, Links(table) if isinstance(table, Link) else table
    try:
        yield
    finally:
        _links = before


def delay(ranks, rank: int, done: float, size: int, hops: int, legs=()) -> float:
    """When a collective that really ended at `done` ends on the paced links.

    `size` and `hops` are those of a ring over the global `ranks`; where there are no hops, `legs` (target, bytes) are
    direct messages.
    """
    global _free_at
    if _links is None:
        return done
    if legs and not hops:
        seconds = sum(_links.link(ranks[rank], target).time(part) for target, part in legs)
    else:
        seconds = _links.ring_time(ranks, size, hops)
    _free_at = max(done, _free_at) + seconds
    return _free_at


def send(source: int, target: int, size: int, start):
    """Start a message by `start()`, which returns a Work: now, or when its paced link has carried it over."""
    if _links is None:
        return start()
    if target not in _lanes:
        _lanes[target] = _Lane()
    return _lanes[target].put(_links.link(source, target), size, start)


class _Lane:
    """The link to one peer: a thread that lets one message after the other through."""

    def __init__(self):
        self.free_at = 0.0
        self.waiting = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, link: Link, size: int, start) -> "_Delayed":
        now = time.perf_counter()
        # the link is busy while the bytes pass; the latency of one message overlaps the bytes of the next
        self.free_at = max(now, self.free_at) + size / link.bandwidth
        work = _Delayed(start)
        self.waiting.put((self.free_at + link.latency, work))
        return work

    def _run(self):
        while True:
            due, work = self.waiting.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            work.go()


class _Delayed:
    """A Work that does not exist yet."""

    def __init__(self, start):
        self.start, self.work, self.error = start, None, None
        self.ready = threading.Event()

    def go(self) -> None:
        try:
            self.work = self.start()
        except Exception as error:
            self.error = error
        self.ready.set()

    def wait(self) -> None:
        self.ready.wait()
        if self.error is not None:
            raise self.error
        self.work.wait()
