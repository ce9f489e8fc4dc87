"""Answers on live ranks: what all ranks give is one table, which a task compares with the right one."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from unittest.mock import patch

from .differences import CHANGED, equal
from .engine import Task
from .guards import LIBRARIES, closed

ALL = "by all ranks"
"""The end of the name of what is summed over ranks."""

SENDS = "all_gather all_gather_object all_reduce all_to_all_single broadcast isend reduce reduce_scatter send"
"""Torch's calls that send."""


def ranked(
    names: tuple[str, ...],
    right: Callable,
    body: Callable,
    ranks: int | Callable,
    *shut: str,
    answers: int = 1,
    **task,
) -> Task:
    """A task on live ranks: on each `body(axis, *answers, *case)` gives what `right(rank, *case)` does, called `names`.

    `ranks` may be a function of the case. Modules in `shut` are closed while a body runs. The rest is as for a Task.
    """
    count = ranks if callable(ranks) else lambda *case: ranks

    def call(*given):
        from . import live

        own, case = given[:answers], given[answers:]
        return by_rank(names, live(_on_a_rank, body, own, case, shut, ranks=count(*case)))

    def want(*case):
        return by_rank(names, [right(rank, *case) for rank in range(count(*case))])

    return Task(want, call=call, brief=True, **task)


def by_rank(names: tuple[str, ...], found: list[tuple]) -> dict:
    """What ranks give, in one table: each thing on every rank, then the next; what ends with ALL is summed."""
    table = {}
    for name, values in zip(names, zip(*found, strict=True), strict=True):
        if name.endswith(ALL):
            table[name] = sum(values)
        else:
            table |= {f"{name} on rank {rank}": value for rank, value in enumerate(values)}
    return table


def sent() -> int:
    """Bytes that this rank has sent through comm since its body began."""
    from ...ranks import comm

    return sum(size for _, size, _ in comm.traffic().values())


def _on_a_rank(rank: int, world_size: int, body: Callable, answers: tuple, case: tuple, shut: tuple) -> tuple:
    import torch.distributed as dist

    from ...ranks import comm
    from ...ranks.mesh import Mesh

    axis, mine = Mesh(dp=world_size)["dp"], deepcopy(case)
    past = {name: partial(_past_comm, getattr(dist, name)) for name in SENDS.split()}
    comm.clear_log()
    with patch.multiple(dist, **past), closed(*shut) if shut else nullcontext():
        found = body(axis, *answers, *mine)
    assert equal(mine, case), CHANGED
    return found


def _past_comm(call: Callable, *args, **kwargs):
    """Call it, unless an answer does so by itself and sends what `comm` does not count."""
    frame = sys._getframe(1)
    past = not frame.f_code.co_filename.startswith(LIBRARIES) or frame.f_locals.get("aside")
    assert not past, f"{call.__name__} sends what nobody counts. Use the calls of comm that are counted"
    return call(*args, **kwargs)
