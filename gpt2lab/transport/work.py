"""What the caller of an asynchronous call gets: torch's Work, on an engine."""

import math
from datetime import timedelta

import torch
import torch.distributed as dist

from .engine import Call, Engine


class SharedMemoryWork(dist.Work):
    """A call that was begun; what torch calls a Work. It holds the call's tensors: whoever drops it frees them."""

    def __init__(self, engine: Engine, call: Call, result: list[torch.Tensor], inputs: list[torch.Tensor]):
        super().__init__()
        self._engine, self._call, self._result, self._inputs = engine, call, result, inputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the call is over; raises what went wrong, and RuntimeError after `timeout`, if one is given."""
        self._engine.wait(self._call, timeout.total_seconds() if timeout else math.inf)
        return True

    def is_completed(self) -> bool:
        """Whether the call is over."""
        return self._call.done

    def is_success(self) -> bool:
        """Whether the call is over and all went well."""
        return self._call.done and self._call.error is None

    def exception(self) -> Exception | None:
        """What went wrong."""
        return self._call.error

    def get_future(self):
        """The same as a future of the resulting tensors."""
        return self._engine.future(self._call, self._result)

    def result(self) -> list[torch.Tensor]:
        """The resulting tensors."""
        return self._result
