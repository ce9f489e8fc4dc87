"""Communication as tasks: a task starts a message, gives its core back, and is over when the message is.

The idea of Task-Aware MPI (Sala et al. 2019). No program waits for a message: a task that reads what it brings has an
edge from the task that receives it. Calls of one axis must begin in the same order on all its ranks, but may end in any
order: tasks of one *wire* start in program order, each as soon as the one before has started.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..machine.arguments import checked
from ..ranks import comm
from ..ranks.mesh import Axis
from .graph import Access, Task, TaskGraph, reads, writes


@checked()
@dataclass(frozen=True)
class Pending:
    """What a body returns whose task is not over yet: a handle of `comm`, and what to do with its result."""

    handle: comm.Handle
    arrived: Callable[[object], object] = lambda result: None


@checked()
def all_reduce(graph: TaskGraph, name: str, axis: Axis, *parts: Access, **options) -> Task:
    """A task that replaces parts of tensors by their sums over the axis, in one message; bytes as `comm.all_reduce`.

    A single contiguous part is summed in place.
    """

    def body(*views):
        alone = len(views) == 1 and views[0].is_contiguous()
        flat = views[0] if alone else torch.cat([view.flatten() for view in views])
        summing = comm.all_reduce(flat, axis, async_op=True, own=True)
        return Pending(summing, lambda total: alone or back(total, views))

    def back(total, views):
        for view, part in zip(views, total.split([v.numel() for v in views]), strict=True):
            view.copy_(part.view_as(view))

    return graph.add(name, body, *parts, **({"wire": axis.name, "kind": "comm"} | options))


@checked()
def send(graph: TaskGraph, name: str, axis: Axis, to: int, tensor: str, *box, **options) -> Task:
    """A task that sends a part of a tensor to the rank at place `to`; it is over when the part may change. Bytes: S."""
    body = lambda x: Pending(comm.isend(x, axis, to))
    options = {"wire": f"{axis.name} to {to}", "kind": "comm"} | options
    return graph.add(name, body, reads(tensor, *box), **options)


@checked()
def receive(graph: TaskGraph, name: str, axis: Axis, source: int, tensor: str, *box, **options) -> Task:
    """A task that receives a part of a tensor from the rank at place `source`."""
    body = lambda x: Pending(comm.irecv(x, axis, source), x.copy_)
    options = {"wire": f"{axis.name} from {source}", "kind": "comm"} | options
    return graph.add(name, body, writes(tensor, *box), **options)
