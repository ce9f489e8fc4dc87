"""How often to save, and what to do without a machine: what failures cost a long job, in any one unit of time.

Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006, "A higher order estimate of
the optimum checkpoint interval for restart dumps".
"""

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..machine.arguments import MORE, checked


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


@checked(save=0, failures=MORE)
def best_interval(save: float, failures: float) -> float:
    """The time between two saves that loses least, if a save takes `save` and a failure comes every `failures`."""
    return math.sqrt(2 * save * failures)


@checked(save=0, failures=MORE)
def daly_interval(save: float, failures: float) -> float:
    """The same to higher order, for failures that are not rare; no longer than the time between two failures."""
    x = save / (2 * failures)
    return failures if x >= 1 else math.sqrt(2 * save * failures) * (1 + math.sqrt(x) / 3 + x / 9) - save


@checked(interval=MORE, save=0, failures=MORE, restart=0, write=0)
def share_lost(
    interval: float, save: float, failures: float, restart: float = 0.0, write: float = 0.0
) -> float:
    """Time lost over time worked, to first order: saves, restarts, and half an interval at each failure.

    A save in the background stops the work for `save` only, and counts when it has been written, `write` later: so much
    more is lost at each failure.
    """
    return save / interval + (interval / 2 + restart + write) / failures


def _countable(count: float, what: str) -> None:
    if count > MOST:
        raise ValueError(
            f"{count:.0e} {what} are too many to go through. Use numbers that make at most {MOST:,}."
        )


@checked(interval=MORE, save=0, restart=0, work=0, write=0)
def life(
    interval: float, save: float, restart: float, failures: Sequence[float], work: float, write: float = 0.0
) -> list[Phase]:
    """The phases of a job of `work` that saves after every `interval` of work and fails at the times in `failures`.

    A failure loses the work since the last complete save, and the save that it interrupts; a failure during a restart
    changes nothing. A save is complete `write` after it let the work go on. Raises ValueError where the next one
    begins before that.
    """
    _countable(work / interval, "saves")
    if write > interval:
        raise ValueError(
            f"A save is written for {write:g}, longer than the {interval:g} between saves. Use a longer interval."
        )
    spans, now, done, coming = [], 0.0, 0, sorted(failures, reverse=True)
    pieces = math.ceil(work / interval * (1 - 1e-12))  # in units of intervals, the last may be shorter
    # when the last save is complete, its first phase, the pieces before it
    written, first, before = 0.0, 0, 0
    while done < pieces:
        worked = now + min(interval, work - done * interval)
        saved = worked + save if done + 1 < pieces else worked
        while coming and coming[-1] <= now:
            coming.pop()
        if coming and coming[-1] < saved:
            hit = coming.pop()
            if hit < written:
                now, done, written = spans[first].start, before, 0.0
                del spans[first:]
            spans += [Phase("lost", now, hit), Phase("restart", hit, hit + restart)]
            now = hit + restart
            continue
        written, first, before = saved + write, len(spans), done
        spans += [Phase("work", now, worked), Phase("save", worked, saved)]
        now, done = saved, done + 1
    return [s for s in spans if s.length]


MOST = 1_000_000
POLICIES = "wait", "hot spare", "elastic"


@checked(machines=1, each=MORE, repair=0, save=0, restart=0, interval=MORE)
@dataclass(frozen=True)
class LongJob:
    """`machines` that each fail once in `each` on average and come back after `repair`; what saves and starts take."""

    machines: int
    each: float
    repair: float
    save: float
    restart: float
    interval: float

    @property
    def failures(self) -> float:
        """The time between two failures of any of them."""
        return self.each / self.machines


@checked(length=MORE, spares=0)
def goodput(job: LongJob, policy: str, length: float, spares: int = 0, seed: int = 0) -> float:
    """Work that is kept in a simulated time, over what all machines do in it without saves and failures.

    "wait" stands still until the broken machine is back; "hot spare" puts in one of `spares`, and waits where none is
    left; "elastic" goes on with the machines that are left, and takes one in again when it is back. Nothing fails while
    all start.
    """
    if policy not in POLICIES:
        raise ValueError(f"No policy is called {policy!r}. Use one of: {', '.join(POLICIES)}.")
    _countable(length * job.machines / job.each, "failures")
    dice, now, kept, broken = random.Random(seed), 0.0, 0.0, []  # when each broken machine will be back
    spares = spares if policy == "hot spare" else 0
    while now < length:
        while broken and broken[0] <= now:
            heapq.heappop(broken)
        up = job.machines - max(0, len(broken) - spares)
        if up < job.machines and (policy != "elastic" or not up):
            now = broken[0] + job.restart
            continue
        back = broken[0] if broken and policy == "elastic" else math.inf
        hit = now + dice.expovariate(up / job.each)
        end = min(hit, length, back)
        kept += up / job.machines * _kept(job, end - now, end == hit)
        now = end + job.restart * (end == back or end == hit and policy != "wait")
        if end == hit:
            heapq.heappush(broken, hit + job.repair)
    return kept / length


def _kept(job: LongJob, time: float, lost: bool) -> float:
    """The work that is kept of a stretch of time: up to its last save, or all of it where it ends with one."""
    whole = math.floor(time / (job.interval + job.save))
    rest = time - whole * (job.interval + job.save)
    return whole * job.interval + (0.0 if lost else max(0.0, min(rest, job.interval) - job.save * (rest > 0)))
