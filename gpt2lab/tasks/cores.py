"""Cores that several processes share: a worker that runs a task holds one, a worker that waits gives it back.

The cores are bytes in a named pipe, as in the jobserver of GNU make: reading one takes a core, and sleeps in the
kernel while there is none; writing it gives the core back. nOS-V (Barcelona Supercomputing Center, 2021) does the same
with one scheduler in shared memory. The core of a process that dies is lost, but then the run has failed anyway.
"""

import os
import time

QUANTUM = 0.02  # seconds after which a worker offers its core to the others, between two tasks


class Cores:
    """The shared cores: one process makes them and keeps them open, `Cores(path, 2)`; the others open `Cores(path)`."""

    def __init__(self, path, count: int = 0):
        """Open the pipe at `path`; with a `count` make it first, with so many cores in it."""
        if not 0 <= count < 256:
            raise ValueError(f"{count} cores: share between 1 and 255.")
        if count:
            os.mkfifo(path, 0o600)
        self._pipe = os.open(path, os.O_RDWR)
        os.write(self._pipe, bytes(range(count)))

    def take(self) -> int:
        """Sleep until a core is free and take it; returns its number."""
        return os.read(self._pipe, 1)[0]

    def give(self, core: int) -> None:
        """Give a core back."""
        os.write(self._pipe, bytes([core]))


class Holder:
    """The core of one worker, or none; without shared cores nothing ever waits."""

    def __init__(self, cores: Cores | None):
        self._cores, self._core, self._since = cores, None, 0.0

    def hold(self) -> None:
        """Take a core if this worker has none; after a quantum it first offers its core to the others."""
        if self._cores is None:
            return
        if self._core is not None and time.perf_counter() - self._since > QUANTUM:
            self.give()
        if self._core is None:
            self._core, self._since = self._cores.take(), time.perf_counter()

    def give(self) -> None:
        """Give the core back, if there is one."""
        if self._core is not None:
            self._cores.give(self._core)
            self._core = None
