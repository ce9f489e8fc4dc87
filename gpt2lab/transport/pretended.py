"""A process group of one: this process is one rank of many, and the others answer at once with nothing.

Calls, shapes and waits are those of a real run; numbers that would arrive are not. A dry run trains over it.
"""

from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from .group import NamedGroup

NAME = "pretended"


class Answered(dist.Work):
    """A call that is over. It refers to the call's tensors, as the work of a real transport does."""

    def __init__(self, *tensors):
        super().__init__()
        self.tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """No-op."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True

    def get_future(self):
        """A future that is done."""
        future = torch.futures.Future()
        future.set_result(None)
        return future


class PretendedGroup(NamedGroup):
    """The methods that torch.distributed calls, by PyTorch's names; what comes into whole numbers is what was sent."""

    backend, timeout = NAME, timedelta(seconds=60)

    def _answer(self, *args, **options):
        return Answered(*args)

    allreduce = reduce = broadcast = allgather = gather = scatter = reduce_scatter = alltoall = _answer
    all_gather_single = reduce_scatter_single = send = recv = barrier = _answer
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def all_to_all_single(self, output, x, coming, going, opts=None):
        """Counts of rows come back as they went: the others are like this rank."""
        if not x.is_floating_point():
            output.copy_(x)
        return self._answer(output, x)

    alltoall_base = all_to_all_single


@contextmanager
def one_of(rank: int, world: int):
    """Inside, this process is one rank of a world. Raises RuntimeError where it is one already."""
    if dist.is_initialized():
        raise RuntimeError("This process is a rank already. Ask for a dry run in a process that is none.")
    if not hasattr(dist.Backend, NAME.upper()):
        make = lambda o, _: PretendedGroup(o.group_rank, len(o.global_ranks_in_group) or o.group_size)
        dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu"])
    if world > 1:
        dist.init_process_group(NAME, store=dist.HashStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        if world > 1:
            dist.destroy_process_group()
