"""Metrics of a parallel run: speed-up, efficiency, serial fraction, work done at the same time, overlap."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

from ..machine.arguments import MORE, checked


@checked(serial=0, parallel=MORE)
def speedup(serial: float, parallel: float) -> float:
    """How many times faster the parallel run is: T1 / Tp, both in the same unit."""
    return serial / parallel


@checked(speedup=0, workers=1)
def efficiency(speedup: float, workers: int) -> float:
    """The speed-up per worker: S / p; 1 is ideal."""
    return speedup / workers


@checked(serial_fraction=(0, 1), workers=1)
def amdahl(serial_fraction: float, workers: float) -> float:
    """Speed-up of a fixed problem with a fraction that cannot be split (Amdahl 1967); at most 1 / serial_fraction."""
    return 1 / (serial_fraction + (1 - serial_fraction) / workers)


@checked(serial_fraction=(0, 1), workers=1)
def gustafson(serial_fraction: float, workers: float) -> float:
    """Speed-up when the problem grows with the workers; the fraction is of the *parallel* time (Gustafson 1988)."""
    return serial_fraction + (1 - serial_fraction) * workers


@checked(speedup=MORE, workers=1)
def karp_flatt(speedup: float, workers: int) -> float:
    """The serial fraction that would explain a measured speed-up (Karp & Flatt 1990): the inverse of Amdahl's law.

    Raises ValueError for one worker, whose speed-up is always 1.
    """
    if workers < 2:
        raise ValueError(f"{workers} worker does not show the serial fraction. Measure 2 or more.")
    return (1 / speedup - 1 / workers) / (1 - 1 / workers)


@checked(chunks=0, compute=0, comm=0)
def sequential(chunks: int, compute: float, comm: float) -> float:
    """Seconds when each of `chunks` is computed, then sent, one thing at a time."""
    return chunks * (compute + comm)


@checked(chunks=1, compute=0, comm=0)
def overlapped(chunks: int, compute: float, comm: float) -> float:
    """Seconds when a chunk is sent while the next is computed: the slower of the two decides, except at both ends.

    One chunk gains nothing; with many the time per chunk approaches the maximum of the two instead of their sum.
    """
    return compute + (chunks - 1) * max(compute, comm) + comm


@checked()
def busy(spans: Iterable) -> dict[int, list[tuple[float, float]]]:
    """For each rank the intervals in which it works: its spans (.rank, .start, .end), joined where they overlap."""
    found = defaultdict(list)
    for s in sorted(spans, key=lambda s: (s.rank, s.start)):
        stretches = found[s.rank]
        if stretches and s.start <= stretches[-1][1]:
            stretches[-1] = stretches[-1][0], max(s.end, stretches[-1][1])
        else:
            stretches.append((s.start, s.end))
    return dict(found)


@checked()
def profile(spans: Iterable) -> list[tuple[float, int]]:
    """The parallelism profile: (time, number of ranks that work from then on), in order of time."""
    changes = defaultdict(int)
    for stretches in busy(spans).values():
        for start, end in stretches:
            changes[start] += 1
            changes[end] -= 1
    times = sorted(changes)
    return list(zip(times, accumulate(changes[time] for time in times), strict=True))


@checked()
def average_parallelism(spans: Iterable) -> float:
    """Ranks that work at the same time, on average: all busy time over the time from first start to last end.

    Raises ValueError without spans.
    """
    stretches = [stretch for of_one in busy(spans).values() for stretch in of_one]
    if not stretches:
        raise ValueError("There are no spans, so there is no average.")
    makespan = max(end for _, end in stretches) - min(start for start, _ in stretches)
    return sum(end - start for start, end in stretches) / makespan


@checked()
def intersection(first: Iterable, second: Iterable) -> float:
    """Seconds in which a span of `first` and a span of `second` (both of one rank) overlap."""
    one, other = ([s for of_one in busy(spans).values() for s in of_one] for spans in (first, second))
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


@checked(workers=1)
def shares(spans: Iterable, workers: int) -> dict[str, float]:
    """Of all the time that the workers had the share of each kind of work, of waiting, and what was left between tasks.

    What is left is the runtime's own: Python that takes the next task and counts who may run.
    """
    spent, spans = defaultdict(float, wait=0.0), [s for s in spans if s.lane != "messages"]
    for s in spans:
        spent[s.kind] += s.end - s.start
    if not spans:
        raise ValueError("There are no spans of work, so there are no shares. Give those of a run.")
    whole = workers * (max(s.end for s in spans) - min(s.start for s in spans))
    found = {kind: seconds / whole for kind, seconds in sorted(spent.items())}
    return found | {"between tasks": 1 - sum(found.values())}
