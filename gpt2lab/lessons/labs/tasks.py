"""Lesson 13's instruments: tasks that sleep, tasks among NaN to see what they touch, contests of ranks and workers."""

import os
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import torch

from ...benchmarks import race
from ...machine.speed import using_threads
from ...model import GPT2, GPT2Config
from ...ranks import comm, trace
from ...ranks.mesh import Mesh
from ...reference import example_batch
from ...tasks import check, messages
from ...tasks.cores import Cores
from ...tasks.gpt2 import Blocks, GPT2Tasks
from ...tasks.graph import EXCLUSIVE, Task, TaskGraph, updates, writes
from ...tasks.runtime import run_fork_join
from ...tasks.scheduler import Scheduler
from .instruments import apart as apart  # cells call these two
from .instruments import mine as mine
from .instruments import seconds_of

CONFIG = GPT2Config(vocab_size=512, n_positions=32, n_layer=2, n_head=4, n_embd=96)
SMALL = Blocks(tokens=64, rows=2, weights=20_000, updates=40_000)


def gpt2_tasks(
    blocks: Blocks = SMALL, rows: int = 4, dtype=torch.float64, config=CONFIG, **options
) -> GPT2Tasks:
    """One iteration of the lesson's GPT-2 as tasks, always the same weights and batch."""
    batch = example_batch(config, rows, 32)
    give = lambda iteration: (batch.tokens, batch.targets)
    return GPT2Tasks(GPT2(config).to(dtype), rows, 32, give, blocks, total=batch.total, **options)


def elements_of(task: Task) -> int:
    """Elements that a task touches."""
    return sum(view.numel() for view in task.views)


def fastest(run: Callable, tries: int = 6) -> list:
    """The spans of the fastest of some runs: the one that other programs disturbed least."""
    return min((run() for _ in range(tries)), key=ms)


def ms(spans: list) -> float:
    """Milliseconds from the first span's start to the last one's end."""
    return 1e3 * (max(s.end for s in spans) - min(s.start for s in spans))


def one_layer(rows: int, length: int, blocks: Blocks) -> TaskGraph:
    """One iteration of a one-layer GPT-2 on (rows, length) tokens, to look at: it has no batches to run on."""
    config = GPT2Config(vocab_size=64, n_positions=length, n_layer=1, n_head=2, n_embd=2 * length)
    return GPT2Tasks(GPT2(config), rows, length, None, blocks).graph


def replay_races(graph: TaskGraph, across: list) -> list[tuple[str, str, str]]:
    """Races of two iterations in a row, of which the second waits for the tasks `across` of the first."""
    n = len(graph.tasks)
    tasks = [replace(task, number=turn * n + task.number) for turn in (0, 1) for task in graph.tasks]
    later = [[n + u for u in graph.before[v]] + list(across[v]) for v in range(n)]
    twice = TaskGraph(graph.tensors)
    twice.tasks = tasks
    return check.races(twice, [*graph.before, *later])


def sleeping(graph: TaskGraph, cost: Callable[[Task], float]) -> TaskGraph:
    """The same tasks and messages; tasks sleep for their `cost` in seconds: as many virtual cores as workers."""
    made = TaskGraph(graph.tensors)
    for t in graph.tasks:
        body = t.body if t.kind == "comm" else lambda *_, t=t: time.sleep(cost(t))
        made.add(t.name, body, *t.accesses, loop=t.loop, kind=t.kind, priority=t.priority, wire=t.wire)
    return made


def paced_by_elements(graph: TaskGraph, seconds: float) -> TaskGraph:
    """The same tasks, which together sleep `seconds`, each in proportion to the elements that it touches."""
    each = seconds / sum(elements_of(t) for t in graph.tasks if t.kind != "comm")
    return sleeping(graph, lambda task: each * elements_of(task))


@cache
def by_block(sizes: tuple[int, ...], workers: int, seconds: float = 0.0) -> list[tuple]:
    """(tokens in a block, T1 / Tinf, runtime / work, ms) of an iteration, which really runs on this many workers.

    The runtime is what a worker does between its first and its last task when it neither runs a task nor waits.
    With `seconds` the tasks sleep instead of computing, so long in all, each in proportion to what it touches.
    """
    rows = []
    for tokens in sizes:
        blocks = Blocks(tokens=tokens, rows=max(1, tokens // 32), weights=20_000, updates=20_000)
        graph = gpt2_tasks(blocks).graph
        parallel = check.parallelism(graph, elements_of)
        graph = paced_by_elements(graph, seconds) if seconds else graph
        spans = fastest(Scheduler(graph, workers).run, 3)
        lanes = [[s for s in spans if s.lane == f"worker {w}"] for w in range(workers)]
        spent = [max(s.end for s in lane) - min(s.start for s in lane) for lane in lanes if lane]
        lost = sum(spent) - sum(s.end - s.start for s in spans)
        busy = sum(s.end - s.start for s in spans if s.kind != "wait")
        rows.append((tokens, parallel, lost / busy, ms(spans)))
    return rows


def write_traces(spans: list, logs: list) -> Path:
    """A new folder with the files that Perfetto and Paraver read, from the spans and logged calls of each rank."""
    folder = Path(mkdtemp(prefix="gpt2lab-traces-"))
    trace.save_chrome(trace.merge(spans), folder / "tasks.json")
    from ...plots.paraver import messages_between, save_paraver  # not above: a rank draws nothing

    save_paraver([s for of_rank in spans for s in of_rank], folder / "tasks.prv", messages_between(logs))
    return folder


def contest(workers: int = 2) -> dict[str, Callable]:
    """One iteration of the lesson's GPT-2 in float32, run by tasks and by torch's own threads."""
    graph, model = gpt2_tasks(dtype=torch.float32).graph, GPT2(CONFIG)
    batch, optimizer = example_batch(CONFIG, 4, 32), torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        (model.loss(model(batch.tokens), batch.targets) / batch.total).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {
        "tasks, one worker": Scheduler(graph, 1).run,
        f"fork-join, {workers} workers": lambda: run_fork_join(graph, workers),
        f"tasks, {workers} workers": Scheduler(graph, workers).run,
        "torch, 1 thread": torch_threads(step, 1),
        f"torch, {workers} threads": torch_threads(step, workers),
    }


@torch.no_grad()
def audit(graph: TaskGraph) -> list[str]:
    """Run the tasks one by one and catch each that touches what it did not declare, in words.

    Before a task everything that it does not read is overwritten with NaN (whole numbers: with 0), so that a number
    used without being declared makes its results NaN. Afterwards all that it may not write must be untouched.
    """
    found = []
    for task in graph.tasks:
        before = {name: t.clone() for name, t in graph.tensors.items()}
        read = ("reads", "updates", "reduces", "concurrent")
        kept = {name: _mask(task, name, t, read) for name, t in before.items()}
        for name, t in graph.tensors.items():
            t[~kept[name]] = float("nan") if t.is_floating_point() else 0
        poisoned = {name: t.clone() for name, t in graph.tensors.items()}
        task.body(*task.views)
        for name, t in graph.tensors.items():
            mine = _mask(task, name, t, (*EXCLUSIVE, "reduces", "concurrent"))
            here, there = (x[~mine].nan_to_num(nan=-7.5e30) for x in (t, poisoned[name]))
            if not torch.equal(here, there):
                found.append(f"{task.name!r} changes {name} outside of what it declares to write")
            if t.is_floating_point() and t[mine].isnan().any():
                said = "uses something that it does not declare to read"
                found.append(f"{task.name!r} {said}: {name} becomes NaN")
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
    spans, *_ = race.turns(race.Contest(contestants), repeat, 1)
    return {name: [1e3 * (end - start) for start, end in of_one] for name, of_one in spans.items()}


def torch_threads(step: Callable, threads: int) -> Callable:
    """The same step with this many threads inside every operation of torch."""

    def run():
        with using_threads(threads):
            step()

    return run


@contextmanager
def one_core(number: int):
    """Inside, this process stays on one of the machine's cores, where the system can do that."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(allowed)[number % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def uneven(
    rank: int, world_size: int, workers: int, path=None, loads=(48, 8), rounds: int = 3
) -> list[float]:
    """Milliseconds of each round in which rank 0 has more tasks than rank 1, and both then sum their results.

    One worker: pinned to a core of its own. With a `path` the workers of all ranks share the cores of that pipe.
    """
    axis, a = Mesh(dp=world_size)["dp"], torch.randn(320, 320)
    graph = TaskGraph({"x": torch.zeros(max(loads), 320, 320), "sum": torch.zeros(4)})
    for number in range(loads[rank]):
        work = lambda x: torch.mm(a, a, out=x[0])
        graph.add(f"work {number}", work, writes("x", (number, number + 1)), kind="forward")
    messages.all_reduce(graph, "sum", axis, updates("sum"))
    scheduler = Scheduler(graph, workers, cores=Cores(path) if path else None)
    together = lambda: comm.barrier(axis)
    with one_core(rank) if workers == 1 else nullcontext():
        return [1e3 * s for s in seconds_of(lambda: (scheduler.run(), together()), rounds, ready=together)]


def lend(pool, cores: int = 2) -> dict[str, list[float]]:
    """Milliseconds of each round of `uneven` on two ranks that are pinned, oversubscribed, or lend each other cores."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "cores")
        kept = Cores(path, cores)
        ways = {"pinned, 1 worker each": (1,), "oversubscribed, 2 each": (2,), "lent, 2 each": (2, path)}
        times = {name: pool.run(uneven, *arguments)[0] for name, arguments in ways.items()}
        for _ in range(cores):
            kept.take()
    return times
