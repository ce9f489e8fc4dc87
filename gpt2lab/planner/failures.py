"""How often to save: what saves, failures and repeated work cost a long job. Any one unit of time throughout.

Young 1974, "A first order approximation to the optimum checkpoint interval".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """What a job does from `start` to `end`: "work" that lasts, "save", "lost" (to be repeated) or "restart"."""

    kind: str
    start: float
    end: float

    @property
    def length(self) -> float:
        """How long it takes."""
        return self.end - self.start


def best_interval(save: float, failures: float) -> float:
    """The work between two saves that loses least, when a save costs `save` and a failure comes every `failures`."""
    return math.sqrt(2 * save * failures)


def share_lost(interval: float, save: float, failures: float, restart: float = 0.0) -> float:
    """Time lost over time worked, to first order: saves, starting again, and half an interval at each failure."""
    return save / interval + (interval / 2 + restart) / failures


def life(interval: float, save: float, restart: float, failures: Sequence[float], work: float) -> list[Span]:
    """What a job of `work` does that saves after every `interval` of it and fails at the times in `failures`.

    A failure loses what was done since the last complete save, and the save that it interrupts; one that comes while
    the job is starting again changes nothing.
    """
    spans, now, done, coming = [], 0.0, 0.0, sorted(failures, reverse=True)
    while done < work:
        step = min(interval, work - done)
        worked = now + step
        saved = worked + save if done + step < work else worked
        while coming and coming[-1] <= now:
            coming.pop()
        if coming and coming[-1] < saved:
            hit = coming.pop()
            spans += [Span("lost", now, hit), Span("restart", hit, hit + restart)]
            now = hit + restart
            continue
        spans += [Span("work", now, worked), Span("save", worked, saved)]
        now, done = saved, done + step
    return [s for s in spans if s.length]
