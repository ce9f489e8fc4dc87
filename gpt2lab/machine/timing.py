"""How to time: warm up, start together, wait until it is done, repeat, and report the middle and the spread."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Times:
    """What trials of one thing took, in seconds; `median` with the quartiles `low` and `high`."""

    trials: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle trial: one disturbed trial does not move it."""
        return statistics.median(self.trials)

    @property
    def low(self) -> float:
        """A quarter of the trials is faster."""
        return self._quartiles()[0]

    @property
    def high(self) -> float:
        """A quarter of the trials is slower."""
        return self._quartiles()[2]

    def _quartiles(self):
        if len(self.trials) < 2:
            return [self.median] * 3
        return statistics.quantiles(self.trials, n=4, method="inclusive")

    def __str__(self) -> str:
        low, middle, high = (1e3 * x for x in (self.low, self.median, self.high))
        return f"{middle:.2f} ms (quartiles {low:.2f} to {high:.2f}, {len(self.trials)} trials)"


def finish_devices() -> None:
    """Wait until every GPU has done what was asked of it; nothing to wait for without one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def trials(
    call: Callable[[], object],
    count: int = 7,
    warmup: int = 2,
    ready: Callable[[], object] = lambda: None,
    finish: Callable[[], object] = finish_devices,
) -> list[tuple[float, float]]:
    """(start, end) of `count` calls after `warmup` that nobody looks at.

    `ready()` runs before each clock starts: among ranks a barrier. `finish()` runs before each clock stops: it waits
    for work that `call` only started.
    """
    found = []
    for trial in range(warmup + count):
        finish()
        ready()
        start = time.perf_counter()
        call()
        finish()
        if trial >= warmup:
            found.append((start, time.perf_counter()))
    return found


def alone(found: Sequence[tuple[float, float]]) -> Times:
    """The times of one process's trials."""
    return Times(tuple(end - start for start, end in found))


def together(per_rank: Sequence[Sequence[tuple[float, float]]]) -> Times:
    """The times of a thing that ranks do together: from the last to arrive until the last to be done.

    `time.perf_counter` is one clock for all processes of a machine.
    """
    return Times(
        tuple(
            max(end for _, end in trial) - max(start for start, _ in trial)
            for trial in zip(*per_rank, strict=True)
        )
    )
