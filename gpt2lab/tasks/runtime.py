"""Run the same tasks in program order or fork-join; `scheduler` runs each as soon as it can. All give the same bits.

torch releases Python's lock inside its operations, so threads do work at the same time; the Python between two
operations runs in one thread at a time. Each way returns the spans of what ran, one lane for each worker; a span of the
kind "wait" is a worker that sleeps.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

import torch

from ..machine.arguments import checked
from ..machine.speed import using_threads
from ..ranks.trace import Span
from . import check
from .graph import Task, TaskGraph
from .messages import Pending


class TaskFailed(RuntimeError):
    """A task raised; the text names it, what it touches and its worker."""


class Recorder:
    """Calls tasks and keeps their spans."""

    def __init__(self):
        self.spans: list[Span] = []
        self.rank = int(os.environ.get("RANK", 0))

    def note(self, name: str, kind: str, start: float, lane: str) -> None:
        """Keep that something took from `start` until now."""
        self.spans.append(Span(name, kind, start, time.perf_counter(), self.rank, lane))

    def call(self, task: Task, worker: int):
        """What the task's body returns. Raises TaskFailed when it raises."""
        start = time.perf_counter()
        try:
            return task.body(*task.views)
        except Exception as error:
            text = f"task {task} on worker {worker} raised {type(error).__name__}: {error}"
            raise TaskFailed(text) from error
        finally:
            self.note(task.name, task.kind, start, f"worker {worker}")

    def finish(self, task: Task, worker: int) -> None:
        """Call a task and, if it starts a message, wait for that too."""
        result = self.call(task, worker)
        if isinstance(result, Pending):
            result.arrived(result.handle.wait())


@contextmanager
def one_thread():
    """Inside, this thread's torch operations use one thread each and record nothing for autograd."""
    with using_threads(1), torch.no_grad():
        yield


def in_threads(work: Callable[[int], None], workers: int) -> None:
    """Run `work(0)` here and the others on threads of their own; return when all are over."""
    threads = [threading.Thread(target=work, args=(w,), name=f"worker {w}") for w in range(1, workers)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()


@checked()
def run_sequential(graph: TaskGraph) -> list[Span]:
    """One worker, in program order."""
    recorder = Recorder()
    with one_thread():
        for task in graph.tasks:
            recorder.finish(task, 0)
    return recorder.spans


@checked(workers=(1, 1024))
def run_fork_join(
    graph: TaskGraph, workers: int = 2, parallel: Callable[[str], bool] = lambda loop: True
) -> list[Span]:
    """Loop after loop, each shared out in equal runs of iterations and ended by a barrier, as OpenMP does it.

    Loops for which `parallel(name)` is false, and messages, run on worker 0 while the others wait at the barrier.
    """
    loops, recorder = check.independent_loops(graph), Recorder()
    barrier, failures = threading.Barrier(workers), []
    alone = {tensor: threading.Lock() for task in graph.tasks for tensor in task.locks}

    def share(loop: list[Task], worker: int) -> list[Task]:
        if loop[0].wire or not parallel(loop[0].loop):
            return loop if worker == 0 else []
        return loop[len(loop) * worker // workers : len(loop) * (worker + 1) // workers]

    def work(worker: int) -> None:
        try:
            with one_thread():
                for loop in loops:
                    for task in share(loop, worker):
                        with ExitStack() as held:
                            for tensor in task.locks:  # sorted, so that no two tasks wait for each other
                                held.enter_context(alone[tensor])
                            recorder.finish(task, worker)
                    start = time.perf_counter()
                    barrier.wait()
                    recorder.note("barrier", "wait", start, f"worker {worker}")
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    in_threads(work, workers)
    if failures:
        raise failures[0]
    return recorder.spans
