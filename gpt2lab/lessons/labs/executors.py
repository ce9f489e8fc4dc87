"""Lesson 13's update: AdamW, a loop whose iterations need nothing of each other, in blocks run by several executors."""

import statistics
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from ...tasks.gpt2 import adamw, ranges
from ...tasks.graph import Task, TaskGraph, updates
from ...tasks.runtime import run_fork_join, run_sequential
from ...tasks.scheduler import Scheduler
from .tasks import torch_threads, turns


def _loop(weights: torch.Tensor, grad: torch.Tensor, size: int) -> TaskGraph:
    """A task for each block of the weights, which steps an optimizer of its own."""
    graph = TaskGraph({"weights": weights})
    for a, b in ranges(len(weights), size):
        part = weights[a:b]
        part.grad = grad[a:b]
        body = partial(_step, adamw([part]))
        graph.add("update", body, updates("weights", (a, b)), loop="update")
    return graph


def _step(optimizer, _) -> None:
    optimizer.step()


def _run(task: Task) -> None:
    task.body(*task.views)


def _ways(start: torch.Tensor, grad, size: int, threads: ThreadPoolExecutor) -> dict[str, tuple]:
    """For each executor tasks with weights of their own, and what runs them once; torch cuts one block by itself."""
    sizes = size, len(start), size, size, size
    one, whole, pooled, joined, free = (_loop(start.clone(), grad, n) for n in sizes)
    return {
        "one thread": (one, lambda: run_sequential(one)),
        "torch's own threads": (whole, torch_threads(lambda: _run(whole.tasks[0]), 2)),
        "ThreadPoolExecutor": (pooled, lambda: list(threads.map(_run, pooled.tasks))),
        "fork-join": (joined, lambda: run_fork_join(joined, 2)),
        "tasks": (free, Scheduler(free, 2).run),
    }


def executors(sizes: list[int], elements: int = 2**22) -> dict[str, list[float]]:
    """Milliseconds (the median) of an update of this many elements on two workers, by executor, for each block's size.

    Raises RuntimeError where an executor leaves other bits than another.
    """
    start, grad = torch.randn(2, elements)
    found: dict[str, list[float]] = {}
    with ThreadPoolExecutor(2) as threads:
        for size in sizes:
            ways = _ways(start, grad, size, threads)
            for name, took in turns({name: run for name, (_, run) in ways.items()}).items():
                found.setdefault(name, []).append(statistics.median(took))
            left = {name: graph.tensors["weights"] for name, (graph, _) in ways.items()}
            if other := [n for n, weights in left.items() if not torch.equal(weights, left["one thread"])]:
                raise RuntimeError(f"{', '.join(other)}, blocks of {size}: other bits than one thread.")
    return found
