"""Bugs in task graphs, their runtimes and GPT-2's tasks: each is noticed by a check that the other tests rely on."""

from dataclasses import replace

import pytest
import torch
from planting import all_planted, planted
from task_cases import WHOLE, made, same, worst
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


def is_wrong(bug, sees, tries=1):
    """Whether a check sees the bug, in one of some tries where workers race."""
    with planted(*bug):
        return any(sees() for _ in range(tries))


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


def only_the_last(right):
    """An edge dropped: a task waits only for the last of those that it needs."""

    def append(self, task):
        right(self, task)
        self.before[-1] = self.before[-1][:1]

    return append


def too_many(right):
    def append(self, task):
        right(self, task)
        self.before[-1] = tuple(dict.fromkeys([*self.before[-1], *range(task.number)[-1:]]))

    return append


def at_the_border(right):
    return lambda self, other: (
        self.tensor == other.tensor
        and all(a[0] + 1 < b[1] and b[0] + 1 < a[1] for a, b in zip(self.box, other.box, strict=False))
    )


GRAPHS = {
    "an access that nobody declared": ((GPT2Tasks, "_add", peeks), lambda: audit(made(WHOLE).graph)),
    "reads where it updates": (changed("loss", "reads"), lambda: audit(made(WHOLE).graph)),
    "reads where it writes": (changed("attention", "reads"), lambda: audit(made(WHOLE).graph)),
    "writes where it updates": (changed("w.embed", "writes"), lambda: audit(made(WHOLE).graph)),
    "an edge dropped": ((TaskGraph, "_append", only_the_last), lambda: check.races(made().graph)),
    "an edge dropped, as the scheduler sees it": ((TaskGraph, "_append", only_the_last), latest_differs),
    "an edge too many": ((TaskGraph, "_append", too_many), lambda: check.needless(made().graph)),
    "parts that touch at one row do not overlap": (
        (Access, "overlaps", at_the_border),
        lambda: latest_differs() or check.races(made().graph),
    ),
    "writers do not wait for readers": (
        (Access, "conflicts", lambda right: lambda self, old: right(self, old) and old.mode != "reads"),
        lambda: latest_differs(2),
    ),
    "a writer forgets earlier readers": (
        (Access, "covers", lambda right: lambda self, other: True),
        lambda: check.races(made().graph),
    ),
    "no edges to the next iteration": (
        (TaskGraph, "across", lambda right: lambda self: [()] * len(self.tasks)),
        replay_races,
    ),
    "an iteration waits for the one before the last": (
        (TaskGraph, "across", lambda right: lambda self: [f[1:] for f in right(self)]),
        replay_races,
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_wrong_graph_is_noticed(name):
    bug, sees = GRAPHS[name]
    assert not sees(), "the right program must pass"
    assert is_wrong(bug, sees), f"nobody noticed: {name}"


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
    "two tasks reduce at once": ((Scheduler, "_pop", no_locks), adding),
    "a handle completed early": ((Scheduler, "_execute", completes_early), lambda: late(False)),
    "a task of the next iteration waits for one too few": (
        (scheduler, "_edges", again_at_once),
        lambda: latest_differs(4),
    ),
}


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_wrong_runtime_is_noticed(name):
    bug, sees = RUNTIMES[name]
    assert not sees(), "the right program must pass"
    assert is_wrong(bug, sees, tries=12), f"nobody noticed: {name}"


def keys_of_queries(right):
    """A slice sends its queries and keys instead of its keys and values."""

    def send(graph, name, axis, to, tensor, *box, **options):
        if len(box) == 2:
            columns = box[1][1] - box[1][0]
            box = box[0], (0, columns)
        return right(graph, name, axis, to, tensor, *box, **options)

    return send


SLICES = {
    "gradients of lent keys are not added": (kernels, "add", lambda right: lambda total, part: None),
    "queries and keys are sent": (messages, "send", keys_of_queries),
    "every slice begins at position 0": (
        kernels,
        "positions_backward",
        lambda right: lambda dx, dwpe, rows, first: right(dx, dwpe, rows, 0),
    ),
}


def sliced_with(rank, world_size, bug):
    """Weights after an iteration on a slice of every sequence, with a bug or without."""
    with all_planted(bug):
        return train(rank, world_size, "tasks", sliced=True, steps=1)[1]


@pytest.mark.parametrize("name", [None, *SLICES])
def test_a_wrong_slice_is_noticed(name, pools):
    found = pools[2].run(sliced_with, SLICES.get(name))
    error = max(worst(weights, serial(1).weights) for weights in found)
    assert error < 1e-10 if name is None else error > 1e-3, f"{name}: {error}"


def without(word):
    """A kernel whose source lacks something: the sum over tokens, the residual, a scale."""
    return {
        "residual": lambda right: lambda dy, x, stats, w, dx, residual=None: right(dy, x, stats, w, dx),
        "gelu": lambda right: lambda dy, w, before, d: torch.mm(dy, w, out=d),
        "scale": lambda right: lambda dlogits, wte, dx, scale: right(dlogits, wte, dx, 1.0),
        "embedding": lambda right: lambda tokens, dx, dwte, first: None,
    }[word]


KERNELS = {
    "gradient past the residual lost": ("layer_norm_backward", "residual"),
    "slope of the gelu lost": ("gelu_backward", "gelu"),
    "sum of losses, not mean, in one place": ("head_backward", "scale"),
    "tied embedding has the head's gradient only": ("embed_backward", "embedding"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_wrong_gradient_is_noticed(name):
    from test_gpt2_tasks import SMALL, test_gradients_are_those_of_autograd

    kernel, word = KERNELS[name]
    with planted(kernels, kernel, without(word)), pytest.raises(AssertionError):
        test_gradients_are_those_of_autograd(SMALL)
