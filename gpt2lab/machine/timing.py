"""Timing: warm up, start together, wait until the work is done, repeat, report the median and the quartiles."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Times:
    """The seconds of all trials of one thing; `median` with the quartiles `low` and `high`."""

    trials: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, which one disturbed trial does not change."""
        return statistics.median(self.trials)

    @property
    def low(self) -> float:
        """The lower quartile."""
        return self._quartiles()[0]

    @property
    def high(self) -> float:
        """The upper quartile."""
        return self._quartiles()[2]

    def _quartiles(self):
        if len(self.trials) < 2:
            return [self.median] * 3
        return statistics.quantiles(self.trials, n=4, method="inclusive")

    def __str__(self) -> str:
        low, middle, high = (1e3 * x for x in (self.low, self.median, self.high))
        return f"{middle:.2f} ms (quartiles {low:.2f} to {high:.2f}, {len(self.trials)} trials)"


def stopwatch(call: Callable[..., object], *args) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call(*args)
    return time.perf_counter() - start


def finish_devices() -> None:
    """Wait until every GPU has finished its work; a no-op without GPUs."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def trials(
    call: Callable[[], object],
    count: int = 7,
    warmup: int = 2,
    ready: Callable[[], object] = lambda: None,
) -> list[tuple[float, float]]:
    """(start, end) of `count` calls after `warmup` calls that are not recorded.

    `ready()` runs before each start is taken: among ranks a barrier. Before each end is taken GPUs finish what `call`
    only started.
    """
    found = []
    for trial in range(warmup + count):
        finish_devices()
        ready()
        start = time.perf_counter()
        call()
        finish_devices()
        if trial >= warmup:
            found.append((start, time.perf_counter()))
    return found


def alone(found: Sequence[tuple[float, float]]) -> Times:
    """The times of one process's trials."""
    return Times(tuple(end - start for start, end in found))


def together(per_rank: Sequence[Sequence[tuple[float, float]]]) -> Times:
    """The times of work that ranks do together: from the last rank's start until the last rank's end.

    `time.perf_counter` is one clock for all processes of a machine.
    """
    seconds = lambda trial: max(end for _, end in trial) - max(start for start, _ in trial)
    return Times(tuple(map(seconds, zip(*per_rank, strict=True))))
