"""Bugs in task graphs, their runtimes and GPT-2's tasks: each is noticed by a check that the other tests rely on."""

from dataclasses import replace

import pytest
import test_gpt2_tasks
import torch
from planting import bugs, is_killed, passes, planted, planting
from task_cases import SMALL, WHOLE, made, same, worst
from test_tasks_live import serial, train

from gpt2lab.algorithms import kernels
from gpt2lab.lessons.labs.tasks import audit
from gpt2lab.tasks import check, graph, messages, scheduler
from gpt2lab.tasks.gpt2 import GPT2Tasks
from gpt2lab.tasks.graph import Access, TaskGraph, reads
from gpt2lab.tasks.messages import Pending
from gpt2lab.tasks.runtime import TaskFailed, run_sequential
from gpt2lab.tasks.scheduler import Scheduler, run_tasks

pytestmark = pytest.mark.mutant


def latest_differs(iterations=1):
    """Whether tasks that run as late as their edges allow give other bits than program order, over some iterations.

    There is one worker, so that nothing is left to chance.
    """
    with planted(Scheduler, "_pop", least_urgent):
        wrong = made()
        try:
            run_tasks(wrong.graph, 1, iterations)
        except (TaskFailed, RuntimeError):
            return True
    want = made()
    for _ in range(iterations):
        run_sequential(want.graph)
    return not same(wrong, want)


def replay_races():
    """Races of three iterations in a row whose edges are those that a replay waits for: certain."""
    graph = made().graph
    n, across = len(graph.tasks), graph.across()
    tasks = [replace(task, number=turn * n + task.number) for turn in range(3) for task in graph.tasks]
    before = [
        [turn * n + u for u in graph.before[v]] + [(turn - 1) * n + u for u in (across[v] if turn else ())]
        for turn in range(3)
        for v in range(n)
    ]
    thrice = TaskGraph(graph.tensors)
    thrice.tasks = tasks
    return check.races(thrice, before)


def least_urgent(right):
    """A scheduler that takes what it should take last: worst for a graph with an edge too few."""

    def pop(self):
        self._ready.sort(reverse=True)
        return self._tasks[self._ready.pop(0)] if self._ready else None

    return pop


def changed(of, mode):
    """`GPT2Tasks._add` that gives the last access of the loop `of` another mode, or drops it."""

    def make(right):
        def add(self, loop, body, *accesses, **options):
            if loop.startswith(of):
                last = accesses[-1]
                accesses = [*accesses[:-1], Access(mode, last.tensor, last.box)]
            right(self, loop, body, *accesses, **options)

        return add

    return GPT2Tasks, "_add", make


def peeks(right):
    """The residual stream is taken from where it lies instead of being declared."""

    def add(self, loop, body, *accesses, **options):
        if loop.startswith("attn.c_proj"):
            *inputs, residual, out = accesses
            hidden = lambda x, w, b, y: body(x, w, b, residual.part(self.graph.tensors[residual.tensor]), y)
            return right(self, loop, hidden, *inputs, out, **options)
        return right(self, loop, body, *accesses, **options)

    return add


def no(sees, *args):
    """A check: what it is given sees nothing wrong."""

    def nothing_is_seen():
        assert not sees(*args)

    return nothing_is_seen


AUDIT, EDGES = no(lambda: audit(made(WHOLE).graph)), no(lambda: check.races(made().graph))
NEEDLESS, REPLAY = no(lambda: check.needless(made().graph)), no(replay_races)
LATEST, TWICE = no(latest_differs), no(latest_differs, 2)
BOTH = no(lambda: latest_differs() or check.races(made().graph))
GRADIENTS = (test_gpt2_tasks.test_gradients_are_those_of_autograd, SMALL)
ONE_EDGE = (
    TaskGraph._append,
    "tuple(kept)",
    "tuple(kept[:1])",
)  # a task waits only for the last that it needs
BUGS = {
    "an access that nobody declared": (GPT2Tasks, "_add", peeks, AUDIT),
    "reads where it updates": (*changed("loss", "reads"), AUDIT),
    "reads where it writes": (*changed("attention", "reads"), AUDIT),
    "writes where it updates": (*changed("w.embed", "writes"), AUDIT),
    "an edge dropped": (*ONE_EDGE, EDGES),
    "an edge dropped, as the scheduler sees it": (*ONE_EDGE, LATEST),
    "an edge too many":
        (TaskGraph._append, "tuple(kept)", "tuple(dict.fromkeys([*kept, *range(number)[-1:]]))", NEEDLESS),
    "parts that touch at one row do not overlap":
        (Access.overlaps, "a[0] < b[1] and b[0] < a[1]", "a[0] + 1 < b[1] and b[0] + 1 < a[1]", BOTH),
    "writers do not wait for readers":
        (Access.conflicts, "and self.overlaps(other)", "and self.overlaps(other) and other.mode != 'reads'",
         TWICE),
    "a writer forgets earlier readers": (Access.covers, "return all", "return True or all", EDGES),
    "no edges to the next iteration":
        (TaskGraph, "across", lambda right: lambda self: [()] * len(self.tasks), REPLAY),
    "an iteration waits for the one before the last":
        (TaskGraph, "across", lambda right: lambda self: [f[1:] for f in right(self)], REPLAY),
    "gradient past the residual lost":
        (kernels.layer_norm_backward, "if residual is not None:", "if False:", GRADIENTS),
    "slope of the gelu lost": (kernels.gelu_backward, "dbefore.mul_(slope)", "pass", GRADIENTS),
    "sum of losses, not mean, in one place": (kernels.head_backward, "alpha=scale", "alpha=1.0", GRADIENTS),
    "tied embedding has the head's gradient only":
        (kernels.embed_backward, "dwte.index_add_(0, tokens[rows] - first, dx[rows])", "pass", GRADIENTS),
}  # fmt: skip


@bugs(BUGS)
def test_a_wrong_graph_or_kernel_is_noticed(bug, check):
    assert is_killed(bug, check), "nobody noticed"


def adding():
    """Tasks that add to one tensor by reading it, waiting, and writing it back."""
    import time

    made = TaskGraph({"x": torch.zeros(3)})

    def add(x):
        now = x.clone()
        time.sleep(0.002)
        x.copy_(now + 1)

    for number in range(12):
        made.add(f"add {number}", add, graph.reduces("x"))
    run_tasks(made, 4)
    return made.tensors["x"].tolist() != [12.0] * 3


def late(handle_done_early):
    """A message that takes 0.1 s, and a task that reads what it brings."""
    import time

    class Slow:
        def join(self):
            time.sleep(0 if handle_done_early else 0.1)
            return torch.ones(3)

        def announce(self, why=""):
            pass

        withdraw = announce

    found, made = [], TaskGraph({"x": torch.zeros(3)})
    made.add("receive", lambda x: Pending(Slow(), x.copy_), graph.writes("x"), wire="w", kind="comm")
    made.add("use", lambda x: found.append(x.tolist()), reads("x"))
    run_tasks(made, 2)
    return found != [[1.0] * 3]


def no_locks(right):
    def pop(self):
        import heapq

        return self._tasks[heapq.heappop(self._ready)] if self._ready else None

    return pop


def completes_early(right):
    def execute(self, task, worker):
        result = self._recorder.call(task, worker)
        with self._lock:
            self._satisfy(self._on_start[task.number])
            self._finish(task)
        if isinstance(result, Pending):
            result.arrived(result.handle.join())

    return execute


def again_at_once(right):
    """A task's counter is not set back for the next iteration."""

    def edges(made):
        after, on_start, first, again = right(made)
        return after, on_start, first, [max(0, n - 1) for n in again]

    return edges


RUNTIMES = {
    "two tasks reduce at once": (Scheduler, "_pop", no_locks, no(adding)),
    "a handle completed early": (Scheduler, "_execute", completes_early, no(late, False)),
    "a task of the next iteration waits for one too few":
        (scheduler, "_edges", again_at_once, no(latest_differs, 4)),
}  # fmt: skip


@bugs(RUNTIMES)
def test_a_wrong_runtime_is_noticed(bug, check):
    """In one of twelve runs: workers race."""
    check()
    with planting(bug):
        assert not all(passes(check) for _ in range(12)), "nobody noticed"


def keys_of_queries(right):
    """A slice sends its queries and keys instead of its keys and values."""

    def send(graph, name, axis, to, tensor, *box, **options):
        if len(box) == 2:
            columns = box[1][1] - box[1][0]
            box = box[0], (0, columns)
        return right(graph, name, axis, to, tensor, *box, **options)

    return send


SLICES = {
    "gradients of lent keys are not added": (kernels.add, "total.add_(part)", "pass"),
    "queries and keys are sent": (messages, "send", keys_of_queries),
    "every slice begins at position 0":
        (kernels.positions_backward, "[first : first + len(part)]", "[: len(part)]"),
}  # fmt: skip


def sliced_with(rank, world_size, bug):
    """Weights after an iteration on a slice of every sequence, with a bug or without."""
    with planting(bug):
        return train(rank, world_size, "tasks", sliced=True, steps=1)[1]


@pytest.mark.parametrize("name", [None, *SLICES])
def test_a_wrong_slice_is_noticed(name, pools):
    found = pools[2].run(sliced_with, SLICES.get(name))
    error = max(worst(weights, serial(1).weights) for weights in found)
    assert error < 1e-10 if name is None else error > 1e-3, f"{name}: {error}"
