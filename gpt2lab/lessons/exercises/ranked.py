"""Answers on live ranks: what all ranks give is one table, which a task compares with the right one."""

from collections.abc import Callable
from contextlib import nullcontext

from .engine import Task
from .guards import closed

ALL = "by all ranks"
"""The end of the name of what is summed over ranks."""


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

        return by_rank(names, live(_on_a_rank, body, given, shut, ranks=count(*given[answers:])))

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


def _on_a_rank(rank: int, world_size: int, body: Callable, given: tuple, shut: tuple[str, ...]) -> tuple:
    from ...ranks import comm
    from ...ranks.mesh import Mesh

    axis = Mesh(dp=world_size)["dp"]
    comm.clear_log()
    with closed(*shut) if shut else nullcontext():
        return body(axis, *given)
