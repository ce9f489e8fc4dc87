"""Spans of time: recorded on each rank, joined by the parent, shown as a timeline.

`time.perf_counter` is one clock for all processes of a machine, so spans of different ranks can be compared. Another
machine's clock starts elsewhere: there, `spans(later=clock_behind(axis)[0])`.
"""

import json
import math
import os
import time
from collections import deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from torch.autograd import _profiler_enabled as profiled
from torch.profiler import record_function

from . import comm
from .traffic import LATEST

KINDS = ("forward", "backward", "weight", "update", "comm", "wait", "other")


@dataclass(frozen=True)
class Span:
    """What `rank` did (`name`) from `start` to `end` (seconds); `lane` separates things done at the same time."""

    name: str
    kind: str
    start: float
    end: float
    rank: int = 0
    lane: str = "work"


_spans: deque[Span] = deque(maxlen=LATEST)


@contextmanager
def span(name: str, kind: str = "other"):
    """Record the block as one span. Kinds: forward backward weight update comm wait other.

    PyTorch's profiler sees it under its name, and so does Nsight inside of `torch.autograd.profiler.emit_nvtx()`.
    """
    if kind not in KINDS:
        raise ValueError(f"No kind of span is called {kind!r}. Use one of: {', '.join(KINDS)}.")
    start = time.perf_counter()
    try:
        with record_function(name) if profiled() else nullcontext():
            yield
    finally:
        _spans.append(Span(name, kind, start, time.perf_counter(), _rank()))


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def spans(with_comm: bool = True, later: float = 0.0) -> list[Span]:
    """This rank's spans in order of their start, all times `later` by so many seconds.

    With `with_comm` also every logged call, in the lane "comm".
    """
    found = list(_spans)
    if with_comm:
        found += [Span(f"{e.op} {e.axis}", "comm", e.start, e.end, _rank(), "comm") for e in comm.log]
    found = [replace(s, start=s.start + later, end=s.end + later) for s in found]
    return sorted(found, key=lambda s: (s.start, s.end))


def clock_behind(axis, rounds: int = 5) -> tuple[float, float]:
    """Seconds by which this rank's clock is behind that of the axis's first rank, and how far off that may be.

    In each round the first rank reads its clock after all have met, and so between two readings of every other rank.
    """
    low, high = -math.inf, math.inf
    for _ in range(rounds):
        before = time.perf_counter()
        comm.barrier(axis)
        first = comm.gather_objects(time.perf_counter(), axis)[0]
        low, high = max(low, first - time.perf_counter()), min(high, first - before)
    return (low + high) / 2, (high - low) / 2


def clear() -> None:
    """Forget the spans so far, and the communication log."""
    _spans.clear()
    comm.clear_log()


def merge(per_rank) -> list[Span]:
    """The spans of all ranks as one list, with time 0 at the earliest start: `merge(launch(fn))`."""
    every = [s for spans_of_one in per_rank for s in spans_of_one]
    zero = min((s.start for s in every), default=0.0)
    return sorted((replace(s, start=s.start - zero, end=s.end - zero) for s in every), key=_order)


def _order(s: Span):
    return s.rank, s.lane, s.start, s.end


def chrome(every: list[Span]) -> dict:
    """The spans in Chrome's trace format, for https://ui.perfetto.dev: a process a rank, a thread a lane."""
    lanes = {lane: number for number, lane in enumerate(sorted({s.lane for s in every}, key="work".__ne__))}
    events = []
    for rank in sorted({s.rank for s in every}):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for lane, number in lanes.items():
            event = {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}
            events.append(event)
    for s in sorted(every, key=_order):
        times = {"ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6}  # microseconds
        event = {"ph": "X", "name": s.name, "cat": s.kind, "pid": s.rank, "tid": lanes[s.lane]}
        events.append(event | times)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_chrome(every: list[Span], path) -> Path:
    """Write `chrome(every)` as a JSON file, which Perfetto and chrome://tracing open."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome(every)))
    return path
