"""Lesson 13's instruments: virtual cores, tasks run among poisoned tensors to see what they touch, and contests."""

import time
from collections import defaultdict
from collections.abc import Callable

import torch

from ...ranks import comm
from ...ranks.mesh import Mesh
from ...tasks import messages
from ...tasks.check import ONE, levels
from ...tasks.cores import Cores
from ...tasks.graph import EXCLUSIVE, Task, TaskGraph, updates, writes
from ...tasks.scheduler import Scheduler


def simulate_tasks(
    graph: TaskGraph, workers: int, cost: Callable[[Task], float] = ONE, overhead: float = 0.0
):
    """When each task would run on `workers` virtual cores, longest remaining chain first: [(worker, start, end)].

    `overhead` is added to every task: what the runtime costs.
    """
    longest, waits = levels(graph, cost), [len(found) for found in graph.before]
    after = defaultdict(list)
    for u, v in graph.edges():
        after[u].append(v)
    ready = [v for v, count in enumerate(waits) if not count]
    free, running, now, plan = list(range(workers)), [], 0.0, [None] * len(waits)
    while ready or running:
        ready.sort(key=lambda v: (longest[v], -v))
        while ready and free:
            v, worker = ready.pop(), free.pop(0)
            end = now + cost(graph.tasks[v]) + overhead
            plan[v] = (worker, now, end)
            running.append((end, v, worker))
        running.sort()
        now, v, worker = running.pop(0)
        free = sorted([*free, worker])
        for w in after[v]:
            waits[w] -= 1
            if not waits[w]:
                ready.append(w)
    return plan


@torch.no_grad()
def audit(graph: TaskGraph) -> list[str]:
    """Run the tasks one by one and catch each that touches what it did not declare, in words.

    Before a task everything that it does not read is overwritten with NaN (whole numbers: with 0), so that a number
    used without being declared makes its results NaN. Afterwards all that it may not write must be untouched.
    """
    found = []
    for task in graph.tasks:
        before = {name: t.clone() for name, t in graph.tensors.items()}
        kept = {
            name: _mask(task, name, t, ("reads", "updates", "reduces", "concurrent"))
            for name, t in before.items()
        }
        for name, t in graph.tensors.items():
            t[~kept[name]] = float("nan") if t.is_floating_point() else 0
        poisoned = {name: t.clone() for name, t in graph.tensors.items()}
        task.body(*task.views)
        for name, t in graph.tensors.items():
            mine = _mask(task, name, t, (*EXCLUSIVE, "reduces", "concurrent"))
            if not torch.equal(
                t[~mine].nan_to_num(nan=-7.5e30), poisoned[name][~mine].nan_to_num(nan=-7.5e30)
            ):
                found.append(f"{task.name!r} changes {name} outside of what it declares to write")
            if t.is_floating_point() and t[mine].isnan().any():
                found.append(
                    f"{task.name!r} uses something that it does not declare to read: {name} becomes NaN"
                )
            before[name][mine] = t[mine]
            t.copy_(before[name])
    return found


def _mask(task: Task, name: str, tensor: torch.Tensor, modes: tuple[str, ...]) -> torch.Tensor:
    """Which elements of a tensor the task touches in one of these modes."""
    mask = torch.zeros(tensor.shape, dtype=torch.bool)
    for access in task.accesses:
        if access.tensor == name and access.mode in modes:
            access.part(mask).fill_(True)
    return mask


def turns(contestants: dict[str, Callable], repeat: int = 5) -> dict[str, list[float]]:
    """Milliseconds of each contestant; they take turns, after one that does not count."""
    found = {name: [] for name in contestants}
    for turn in range(repeat + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if turn:
                found[name].append(1e3 * (time.perf_counter() - start))
    return found


def torch_threads(step: Callable, threads: int) -> Callable:
    """The same step with this many threads inside every operation of torch."""

    def run():
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        step()
        torch.set_num_threads(before)

    return run


def uneven(
    rank: int, world_size: int, workers: int, path=None, loads=(48, 8), rounds: int = 3
) -> list[float]:
    """Milliseconds of each round in which rank 0 has more tasks than rank 1, and both then sum their results.

    With a `path` the workers of all ranks share the cores of that pipe.
    """
    axis, a = Mesh(dp=world_size)["dp"], torch.randn(320, 320)
    graph = TaskGraph({"x": torch.zeros(max(loads), 320, 320), "sum": torch.zeros(4)})
    for number in range(loads[rank]):
        work = lambda x: torch.mm(a, a, out=x[0])
        graph.add(f"work {number}", work, writes("x", (number, number + 1)), kind="forward")
    messages.all_reduce(graph, "sum", axis, updates("sum"))
    scheduler, found = Scheduler(graph, workers, cores=Cores(path) if path else None), []
    for _ in range(rounds + 1):
        comm.barrier(axis)
        start = time.perf_counter()
        scheduler.run()
        comm.barrier(axis)
        found.append(1e3 * (time.perf_counter() - start))
    return found[1:]
