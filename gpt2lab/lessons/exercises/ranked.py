"""Answers on live ranks: what all ranks give is one table, which a task compares with the right one."""

import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
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
_since = {"begun": 0}


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
        found, said = zip(*live(_on_a_rank, body, own, case, shut, ranks=count(*case)), strict=True)
        table = by_rank(names, found)
        table.but = next(filter(None, said), "")
        return table

    def want(*case):
        return by_rank(names, [right(rank, *case) for rank in range(count(*case))])

    return Task(want, call=call, brief=True, **task)


class Table(dict):
    """What ranks give; `but` is what to say of it where it is right."""

    but = ""


def by_rank(names: tuple[str, ...], found: list[tuple]) -> Table:
    """What ranks give, in one table: each thing on every rank, then the next; what ends with ALL is summed."""
    table = Table()
    for name, values in zip(names, zip(*found, strict=True), strict=True):
        if name.endswith(ALL):
            table[name] = sum(values)
        else:
            table.update({f"{name} on rank {rank}": value for rank, value in enumerate(values)})
    return table


def start_counting() -> None:
    """What this rank sends is counted from now on."""
    from ...ranks import comm
    from ...ranks.call import begun

    comm.clear_log()
    _since["begun"] = begun()


def through_comm():
    """Raises AssertionError where an answer sends something past `comm` in the block."""
    import torch.distributed as dist

    return patch.multiple(dist, **{name: partial(_past_comm, getattr(dist, name)) for name in SENDS.split()})


@contextmanager
def counted():
    """The same; gives a list, which is told at the end if what was sent in the block is not in the log of `comm`."""
    from ...ranks import comm
    from ...ranks.call import begun

    said = []
    start_counting()
    with through_comm():
        yield said
    calls, there = begun() - _since["begun"], len(comm.log)
    if calls != there:
        said.append(
            f"of {calls} calls of comm {there} are over and counted: wait() for what isend and irecv give"
        )


def sent() -> int:
    """Bytes that this rank has sent through comm since its body began."""
    from ...ranks import comm

    return sum(size for _, size, _ in comm.traffic().values())


def _on_a_rank(rank: int, world_size: int, body: Callable, answers: tuple, case: tuple, shut: tuple) -> tuple:
    from ...ranks.mesh import Mesh

    axis, mine = Mesh(dp=world_size)["dp"], deepcopy(case)
    with counted() as said, closed(*shut) if shut else nullcontext():
        found = body(axis, *answers, *mine)
    assert equal(mine, case), CHANGED
    return found, "".join(said)


def _past_comm(call: Callable, *args, **kwargs):
    """Call it, unless an answer does so by itself and sends what `comm` does not count."""
    frame = sys._getframe(1)
    past = not frame.f_code.co_filename.startswith(LIBRARIES) or frame.f_locals.get("aside")
    assert not past, f"{call.__name__} sends what nobody counts. Use the calls of comm that are counted"
    return call(*args, **kwargs)
