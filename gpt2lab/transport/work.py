"""The handle of an asynchronous call: torch's Work, on a progress engine."""

import math
from datetime import timedelta

import torch
import torch.distributed as dist

from .engine import ProgressEngine, Request


class SharedMemoryWork(dist.Work):
    """A request that was begun. It refers to the call's tensors: their memory is free once this object is."""

    def __init__(self, engine: ProgressEngine, request: Request, result: list, inputs: list):
        super().__init__()
        self._engine, self._call, self._result, self._inputs = engine, request, result, inputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the call is done; raises its error, and PeerLost after `timeout`, if one is given."""
        self._engine.wait(self._call, timeout.total_seconds() if timeout else math.inf)
        return True

    def is_completed(self) -> bool:
        """Whether the call is done."""
        return self._call.done

    def is_success(self) -> bool:
        """Whether the call is done and has no error."""
        return self._call.done and self._call.error is None

    def exception(self) -> Exception | None:
        """The error of the call, or None."""
        return self._call.error

    def get_future(self):
        """A future of the resulting tensors."""
        return self._engine.future(self._call, self._result)

    def result(self) -> list[torch.Tensor]:
        """The resulting tensors."""
        return self._result
