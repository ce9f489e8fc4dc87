"""When a GPU gets somewhere, on the clock of the host: marked by CUDA's events, read only when somebody asks."""

import time

import torch

LASTS = 60.0  # seconds for which one zero serves: clocks drift apart, and an event counts in 32 bits
_zero: tuple | None = None  # an event, and the host's time when it came


class DeviceTime:
    """When the GPU will have done what its current stream holds now.

    `float()` gives it in seconds of `time.perf_counter`, and waits for it: so nothing waits before it is read.
    """

    def __init__(self):
        self._zero, self._event, self._seconds = _recent_zero(), torch.cuda.Event(enable_timing=True), None
        self._event.record()

    def __float__(self) -> float:
        if self._seconds is None:
            self._event.synchronize()
            event, seconds = self._zero
            self._seconds = seconds + event.elapsed_time(self._event) / 1e3
            self._zero = self._event = None
        return self._seconds

    def __reduce__(self):
        return float, (float(self),)


def _recent_zero() -> tuple:
    """An event, and the host's time when it came: on a stream that never waits for a message.

    Streams come from two pools; communicators take theirs from that of the less urgent ones.
    """
    global _zero
    if _zero is None or time.perf_counter() - _zero[1] > LASTS:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.Stream(priority=-1))
        event.synchronize()
        _zero = event, time.perf_counter()
    return _zero
