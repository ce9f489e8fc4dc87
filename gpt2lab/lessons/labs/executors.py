"""Lesson 13's region: AdamW's update, a loop without dependencies, cut into pieces and run by several executors."""

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from ...tasks.gpt2 import ranges
from ...tasks.graph import Task, TaskGraph, reads, updates
from ...tasks.runtime import run_fork_join, run_sequential
from ...tasks.scheduler import Scheduler
from .tasks import torch_threads, turns


def _update(grad, weight, first, second) -> None:
    first.lerp_(grad, 0.1)
    second.mul_(0.999).addcmul_(grad, grad, value=0.001)
    weight.addcdiv_(first, second.sqrt().add_(1e-8), value=-1e-3)


def _run(task: Task) -> None:
    task.body(*task.views)


def _ways(graph: TaskGraph, threads: ThreadPoolExecutor, workers: int) -> dict[str, Callable]:
    return {
        "pieces, one thread": lambda: run_sequential(graph),
        "torch's own threads": torch_threads(lambda: _update(*graph.tensors.values()), workers),
        "ThreadPoolExecutor": lambda: list(threads.map(_run, graph.tasks)),
        "fork-join": lambda: run_fork_join(graph, workers),
        "tasks": Scheduler(graph, workers).run,
    }


def regions(sizes: list[int], elements: int = 2**20, workers: int = 2) -> dict[str, list[float]]:
    """Milliseconds (the median) of an update of this many elements, by executor, for each number in a piece.

    Torch's own threads cut the loop as they like, so their line is flat. Raises RuntimeError if a bit differs.
    """
    start, found = torch.randn(4, elements).abs().unbind(), {}
    want = [t.clone() for t in start]
    _update(*want)
    with torch.no_grad(), ThreadPoolExecutor(workers) as threads:
        for size in sizes:
            graph = TaskGraph(dict(zip("gwmv", map(torch.clone, start), strict=True)))
            for part in ranges(elements, size):
                graph.add(
                    "update", _update, reads("g", part), *(updates(n, part) for n in "wmv"), loop="update"
                )
            ways = _ways(graph, threads, workers)
            for name, way in ways.items():
                for tensor, before in zip(graph.tensors.values(), start, strict=True):
                    tensor.copy_(before)
                way()
                if not all(map(torch.equal, graph.tensors.values(), want)):
                    raise RuntimeError(f"{name}, pieces of {size}: other bits than in one piece.")
            for name, took in turns(ways).items():
                found.setdefault(name, []).append(statistics.median(took))
    return found
