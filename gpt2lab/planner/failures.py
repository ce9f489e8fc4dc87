"""How often to save: the time that saves, failures and repeated work cost a long job, in any one unit of time.

Young 1974, "A first order approximation to the optimum checkpoint interval".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """What a job does from `start` to `end`: "work" that is kept, "save", "lost" (work to be repeated) or "restart"."""

    kind: str
    start: float
    end: float

    @property
    def length(self) -> float:
        """The time from start to end."""
        return self.end - self.start


def best_interval(save: float, failures: float) -> float:
    """The time between two saves that loses least, if a save takes `save` and a failure comes every `failures`."""
    return math.sqrt(2 * save * failures)


def share_lost(interval: float, save: float, failures: float, restart: float = 0.0) -> float:
    """Time lost over time worked, to first order: saves, restarts, and half an interval at each failure."""
    return save / interval + (interval / 2 + restart) / failures


def life(interval: float, save: float, restart: float, failures: Sequence[float], work: float) -> list[Phase]:
    """The phases of a job of `work` that saves after every `interval` of work and fails at the times in `failures`.

    A failure loses the work since the last complete save, and the save that it interrupts; a failure during a restart
    changes nothing.
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
            spans += [Phase("lost", now, hit), Phase("restart", hit, hit + restart)]
            now = hit + restart
            continue
        spans += [Phase("work", now, worked), Phase("save", worked, saved)]
        now, done = saved, done + step
    return [s for s in spans if s.length]
