"""Worker threads that take tasks as soon as these may run, for one iteration or for many without a barrier between."""

import heapq
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from ..machine.arguments import MORE, checked
from ..ranks.trace import Span
from . import check
from .cores import Cores, Holder
from .graph import Task, TaskGraph
from .messages import Pending
from .runtime import Recorder, TaskFailed, in_threads, one_thread


@checked(workers=(1, 1024), iterations=(0, 10**9))
def run_tasks(graph: TaskGraph, workers: int = 2, iterations: int = 1, **options) -> list[Span]:
    """Run all tasks so many times on worker threads; `options` are those of `Scheduler`."""
    return Scheduler(graph, workers, **options).run(iterations)


@checked(workers=(1, 1024), patience=MORE, iterations=(0, 10**9))
class Scheduler:
    """Runs a graph: built once, `run(iterations)` replays it, with edges from each iteration to the next (taskiter).

    A task is ready when all that it waits for is over. Of the ready ones messages come first, then `Task.priority`,
    then what begins the longest chain. `cores`, shared with other processes: a worker runs tasks only while it holds
    one. `blocking`: the worker that starts a message waits for it. `patience`: seconds without progress, with messages
    under way and nothing to run, after which the run fails.

    There is one queue. One for each worker, which keeps the tasks that it made ready, whose data are in its cache, and
    steals when it has none, was no faster on two cores, so it was left out.
    """

    def __init__(
        self,
        graph: TaskGraph,
        workers: int = 2,
        *,
        cores: Cores | None = None,
        blocking: bool = False,
        patience: float = 20.0,
    ):
        self.graph, self.workers, self.cores = graph, workers, cores
        self.blocking, self.patience = blocking, patience
        self._after, self._on_start, self._first, self._again = _edges(graph)
        longest = check.levels(graph)
        urgency = lambda t: (not t.wire, -t.priority, -longest[t.number], t.number)
        self._tasks = sorted(graph.tasks, key=urgency)
        self._place = {task.number: place for place, task in enumerate(self._tasks)}
        self._lock = threading.Condition()
        self._starting = threading.Lock()  # calls of `comm` begin one at a time

    def run(self, iterations: int = 1) -> list[Span]:
        """Run all tasks so many times; returns the spans. Raises TaskFailed; TimeoutError when messages stay away."""
        self._waits, self._turns = list(self._first), [iterations] * len(self._first)
        self._left, self._busy = iterations * len(self._first), 0
        self._ready, self._held, self._blocked = [], set(), defaultdict(list)
        self._under_way: dict[int, Pending] = {}
        self._failure, self._announced = None, None
        self._recorder = Recorder()
        with self._lock:
            self._push(number for number, count in enumerate(self._waits) if not count and iterations)
        in_threads(self._work, self.workers)
        if self._failure is not None:
            raise self._failure
        return self._recorder.spans

    def _work(self, worker: int) -> None:
        core = Holder(self.cores)
        try:
            with one_thread():
                while (task := self._next(worker, core)) is not None:
                    core.hold()
                    self._execute(task, worker)
        except BaseException as error:
            self._fail(error)
        finally:
            core.give()

    def _execute(self, task: Task, worker: int) -> None:
        if not task.wire:
            result = self._recorder.call(task, worker)
        else:
            with self._starting:
                result = self._recorder.call(task, worker)
                with self._lock:
                    self._satisfy(self._on_start[task.number])
        if isinstance(result, Pending) and not self.blocking:
            with self._lock:
                self._busy -= 1
                self._under_way[task.number] = result
            args = (task, result, result.handle.join, "messages", self._recorder)
            threading.Thread(target=self._arrive, args=args, daemon=True).start()
        elif isinstance(result, Pending):
            self._arrive(task, result, result.handle.wait, f"worker {worker}", self._recorder)
        else:
            with self._lock:
                self._finish(task)

    def _arrive(self, task: Task, pending: Pending, wait: Callable, lane: str, recorder: Recorder) -> None:
        """Sleep until the message is done; then the task is over. Runs on a thread of its own, or blocks a worker."""
        start, now = time.perf_counter(), lambda: recorder is self._recorder  # else its run has failed
        try:
            result = wait()
            if now():
                pending.arrived(result)
        except BaseException as error:
            failed = TaskFailed(f"the message of task {task} failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
            if now():
                self._fail(failed)
            return
        recorder.note(task.name, task.kind, start, lane)
        with self._lock:
            if not now():
                return
            if self._announced is not None:
                self._announced.withdraw()
                self._announced = None
            if self._under_way.pop(task.number, None) is not None:
                self._busy += 1
            self._finish(task)

    def _next(self, worker: int, core: Holder) -> Task | None:
        """The next task of a worker, which sleeps, without a core, while none is ready; None when all are over."""
        with self._lock:
            while self._left and self._failure is None:
                if (task := self._pop()) is not None:
                    self._busy += 1
                    self._turns[task.number] -= 1
                    self._waits[task.number] = self._again[task.number]
                    return task
                core.give()
                if not self._busy:
                    self._idle(worker)
                start = time.perf_counter()
                moved = self._lock.wait(self.patience)
                self._recorder.note("nothing is ready", "wait", start, f"worker {worker}")
                if not moved and not self._busy and not self._ready:
                    raise TimeoutError(f"{self._stuck()} Nothing has moved for {self.patience:g} s.")
        return None

    def _idle(self, worker: int) -> None:
        """Nothing can run before a message comes: the main thread announces the oldest one on the status board."""
        if not self._under_way:
            raise RuntimeError(self._stuck())
        if worker == 0 and self._announced is None:
            number, pending = next(iter(self._under_way.items()))
            self._announced = pending.handle
            pending.handle.announce(f" of task {self.graph.tasks[number].name!r}")
        elif self._announced is None:
            self._lock.notify_all()

    def _stuck(self) -> str:
        """Which task waits for what, in words."""
        words = []
        for number, pending in self._under_way.items():
            words.append(f"task {self.graph.tasks[number]} waits for {pending.handle.waits_for()}")
        for number, count in enumerate(self._waits):
            if count and self._turns[number] and number not in self._under_way and len(words) < 8:
                words.append(f"{self.graph.tasks[number].name!r} waits for {count} more")
        return f"rank {self._recorder.rank} has no task to run: {'; '.join(words)}."

    def _pop(self) -> Task | None:
        """The most urgent ready task, except those that reduce into a tensor while another task does."""
        while self._ready:
            task = self._tasks[heapq.heappop(self._ready)]
            taken = next((name for name in task.locks if name in self._held), None)
            if taken is None:
                self._held.update(task.locks)
                return task
            self._blocked[taken].append(task.number)
        return None

    def _push(self, numbers) -> None:
        """These tasks may run now."""
        for number in numbers:
            heapq.heappush(self._ready, self._place[number])
            self._lock.notify()

    def _satisfy(self, numbers) -> None:
        """One of the things that these tasks wait for has happened."""
        for number in numbers:
            self._waits[number] -= 1
        self._push(n for n in numbers if not self._waits[n] and self._turns[n])

    def _finish(self, task: Task) -> None:
        """The task and its message are over: make those ready that waited for it."""
        self._busy -= 1
        self._left -= 1
        for name in task.locks:
            self._held.discard(name)
            self._push(self._blocked.pop(name, ()))
        self._satisfy(self._after[task.number])
        if not self._again[task.number] and self._turns[task.number]:
            self._push([task.number])
        if not self._left:
            self._lock.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            self._lock.notify_all()


def _edges(graph: TaskGraph):
    """For each task: which tasks wait for its end, which for its start, for how many it waits at first, and later."""
    n = len(graph.tasks)
    after, on_start = [[] for _ in range(n)], [[] for _ in range(n)]
    first, again = [0] * n, [0] * n
    wires = defaultdict(list)
    for v, (inside, across) in enumerate(zip(graph.before, graph.across(), strict=True)):
        for u in (*inside, *across):
            after[u].append(v)
        first[v], again[v] = len(inside), len(inside) + len(across)
        if graph.tasks[v].wire:
            wires[graph.tasks[v].wire].append(v)
    for line in wires.values():
        for u, v in zip(line, line[1:] + line[:1], strict=True):
            on_start[u].append(v)
            first[v] += v != line[0]
            again[v] += 1
    return after, on_start, first, again
