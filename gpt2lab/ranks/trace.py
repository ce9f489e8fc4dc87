"""Spans of time that a rank spent on something, for timelines."""

import time
from contextlib import contextmanager
from dataclasses import dataclass

_spans = []


@dataclass(frozen=True)
class Span:
    """From `start` to `end` (seconds of a clock that all ranks of one machine share) a rank did `name`."""

    name: str
    kind: str
    start: float
    end: float


@contextmanager
def span(name: str, kind: str = "other"):
    """Record what happens inside as one span."""
    start = time.perf_counter()
    yield
    _spans.append(Span(name, kind, start, time.perf_counter()))
