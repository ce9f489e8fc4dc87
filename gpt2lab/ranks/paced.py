"""Links of a set speed: the message is real, its time is latency + bytes / bandwidth, whatever the machine.

Together with computing that is replaced by sleeping, this shows overlap and bubbles truly on any laptop.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor


class PacedLink:
    """One message after the other, each taking `latency` + size / `bandwidth` seconds, beside what the rank does."""

    def __init__(self, latency: float, bandwidth: float):
        self.latency, self.bandwidth = latency, bandwidth
        self._carrier = ThreadPoolExecutor(1)

    def seconds(self, size: int) -> float:
        """How long a message of `size` bytes takes."""
        return self.latency + size / self.bandwidth

    def start(self, size: int, call) -> Future:
        """Begin a message of `size` bytes: `call()` does the real one; `.result()` waits until the link is done."""
        return self._carrier.submit(self._carry, size, call)

    def _carry(self, size: int, call):
        end = time.perf_counter() + self.seconds(size)
        result = call()
        time.sleep(max(0.0, end - time.perf_counter()))
        return result
