"""One iteration of GPT-2 run in six ways: program order, torch's own threads, fork-join, tasks, replayed tasks, ranks.

The protocol is that of the port of llm.c at the Barcelona Supercomputing Center: so many runs of so many iterations,
without validation or generation, the first iteration apart. Versions take turns. Written: a JSON file, and a dashboard
with the published figures (112 CPUs) beside. With --all the costs of a task and of building a graph are measured too.
"""

import statistics
import threading
from collections import defaultdict
from dataclasses import replace
from functools import partial

import torch

from ..machine.timing import stopwatch
from ..model import GPT2, PRESETS, GPT2Config
from ..planner import metrics
from ..processes.launch import Ranks, kept
from ..ranks import comm
from ..ranks.mesh import Mesh
from ..tasks.gpt2 import Blocks, GPT2Tasks, adamw
from ..tasks.graph import TaskGraph, updates
from ..tasks.runtime import run_fork_join, run_sequential
from ..tasks.scheduler import Scheduler, run_tasks
from . import race
from .race import Contest, Heat
from .races import VERSIONS

PUBLISHED = {"sequential": 35.0, "fork-join": 1.430, "fork-join over nOS-V": 1.616}
"""Seconds of an iteration on 112 CPUs (from the wiki of the port): OpenMP, and the same over nOS-V."""


def run(args) -> dict[str, float]:
    """Run the protocol, print the table, write JSON and dashboard."""
    from ..plots import tasks as plots

    if args.rows < args.workers or args.iterations < 2:
        raise ValueError(
            f"{args.rows} rows, {args.workers} workers, {args.iterations} iterations: "
            "take at least a row a worker and 2 iterations."
        )
    print(f"GPT-2 {args.config}, B={args.rows}, T={args.length}, {args.workers} workers, float32 (measured)")
    found = protocol(VERSIONS if args.all else tuple(args.versions), args)
    report = {"options": vars(args), "versions": summary(found, args.workers), "published": PUBLISHED}
    for name, row in report["versions"].items():
        print(f"  {name:15}" + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))
    if args.all:
        graph = one_process(args).graph
        report["overhead"] = overhead(args.workers) | dispatch(graph, args)
        report["building"] = building(args)
        report["queues"] = queues(graph, args)
        report["profile"] = where_time_goes(graph, args.workers)
        for what, figure in (report["overhead"] | report["building"] | report["queues"]).items():
            print(f"  {what:58}{figure:10.2f}")
        print("  where the workers' time goes, percent")
        for name, row in report["profile"].items():
            print(f"    {name:13}" + "  ".join(f"{kind} {100 * share:.1f}" for kind, share in row.items()))
    race.save_race(
        args.out, args.config, report | {"seconds": found}, plots.dashboard(found, args.workers, PUBLISHED)
    )
    return {name: row["mean"] for name, row in report["versions"].items()}


def protocol(versions, args) -> dict[str, list[list[float]]]:
    """{version: seconds of every iteration, for every run}; versions take turns."""
    with Ranks(args.workers, echo=False, timeout=600) as ranks:
        graph = one_process(args).graph
        several = lambda name: partial(version(name, graph, args), args.iterations)
        live = lambda: ranks.run(on_rank, args)[0]
        ways = {name: live if name == "ranks x tasks" else several(name) for name in versions}
        contest = Contest(ways, own=True, after=lambda name, seconds: seconds)
        return race.race(Heat("{}", lambda: contest), args.rounds, warm_up=0).more[0]


def summary(found: dict, workers: int) -> dict[str, dict[str, float]]:
    """Mean seconds without first iterations, spread over the runs, the first alone; speed-up and what follows."""
    rows, serial = {}, None
    for name, runs in found.items():
        means = [statistics.mean(run[1:]) for run in runs]
        row = {"mean": statistics.mean(means), "spread": max(means) - min(means)}
        row["first"] = statistics.mean(run[0] for run in runs)
        serial = row["mean"] if name == VERSIONS[0] else serial
        if serial and name != VERSIONS[0]:
            row["speedup"] = metrics.speedup(serial, row["mean"])
            row["efficiency"] = metrics.efficiency(row["speedup"], workers)
            row["karp_flatt"] = metrics.karp_flatt(row["speedup"], workers) if workers > 1 else 1.0
        rows[name] = row
    return rows


def batches(args):
    """A function that gives the same random batch in every iteration."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(PRESETS[args.config].vocab_size, (args.rows, args.length + 1), generator=generator)
    return lambda iteration: (tokens[:, :-1], tokens[:, 1:])


def one_process(args) -> GPT2Tasks:
    """The tasks of one process, with a block of tokens for each worker."""
    rows = -(-args.rows // args.workers)
    blocks = Blocks(tokens=rows * args.length, rows=rows)
    return GPT2Tasks(GPT2(PRESETS[args.config]), args.rows, args.length, batches(args), blocks)


def version(name: str, graph: TaskGraph, args):
    """A function that runs so many iterations of a version and returns the seconds of each."""
    if name == "torch threads":
        return torch_threads(args)
    if name == "taskiter":
        scheduler = Scheduler(graph, args.workers)
        return lambda n: [stopwatch(scheduler.run, 1), *[stopwatch(scheduler.run, n - 1) / (n - 1)] * (n - 1)]
    once = {
        "sequential": lambda: run_sequential(graph),
        "fork-join": lambda: run_fork_join(graph, args.workers),
        "tasks": lambda: run_tasks(rebuilt(graph), args.workers),
    }[name]
    return lambda n: [stopwatch(once) for _ in range(n)]


def torch_threads(args):
    """The rival: GPT-2 as it is, with autograd and fused AdamW, and threads inside every operation of torch."""
    model, (tokens, targets) = GPT2(PRESETS[args.config]), batches(args)(0)
    optimizer = adamw(list(model.parameters()))

    def step():
        (model.loss(model(tokens), targets) / targets.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def several(n):
        before = torch.get_num_threads()
        torch.set_num_threads(args.workers)
        seconds = [stopwatch(step) for _ in range(n)]
        torch.set_num_threads(before)
        return seconds

    return several


def on_rank(rank: int, world_size: int, args) -> list[float]:
    """Seconds of every iteration on ranks of one worker each, that share the rows and sum gradients by tasks."""
    axis = Mesh(dp=world_size)["dp"]
    if "tasks" not in kept:
        mine = torch.arange(args.rows).tensor_split(world_size)[rank]
        give = lambda iteration: [part[mine] for part in batches(args)(iteration)]
        options = {"total": args.rows * args.length, "axis": axis}
        model = GPT2(PRESETS[args.config])
        kept["tasks"] = GPT2Tasks(model, len(mine), args.length, give, Blocks(tokens=0, rows=0), **options)
    scheduler, seconds = Scheduler(kept["tasks"].graph, 1), []
    for _ in range(args.iterations):
        comm.barrier(axis)
        seconds.append(stopwatch(scheduler.run, 1))
    return seconds


def rebuilt(graph: TaskGraph) -> TaskGraph:
    """The same tasks in a new graph, as a program has it that declares them anew in every iteration."""
    new = TaskGraph(graph.tensors)
    for t in graph.tasks:
        new.add(t.name, t.body, *t.accesses, loop=t.loop, kind=t.kind, priority=t.priority, wire=t.wire)
    return new


def overhead(workers: int, tasks: int = 1000) -> dict[str, float]:
    """Microseconds a task costs besides its work: chains of empty tasks; and the share lost with tasks of 1 ms."""
    graph = TaskGraph({"x": torch.zeros(workers)})
    fill = lambda: [add_links(graph, workers, lambda x: None) for _ in range(tasks // workers)]
    found = {"to build, microseconds a task": stopwatch(fill)}
    found["in program order"] = stopwatch(run_sequential, graph)
    found["in fork-join, a barrier for each " + str(workers)] = stopwatch(run_fork_join, graph, workers)
    scheduler = Scheduler(graph, workers)
    found["replayed by workers"] = stopwatch(scheduler.run, 5) / 5
    found = {what: 1e6 * seconds / tasks for what, seconds in found.items()}
    a = torch.randn(384, 384)
    size = 1e-3 / min(stopwatch(lambda: a @ a) for _ in range(20))
    work = TaskGraph({"x": torch.zeros(workers)})
    for _ in range(100):
        add_links(work, workers, lambda x: [a @ a for _ in range(max(1, round(size)))])
    scheduler = Scheduler(work, workers)
    seconds = stopwatch(scheduler.run, 5)
    busy = sum(s.end - s.start for s in scheduler.run(5) if s.kind != "wait")
    found["percent of the workers' time lost, tasks of 1 ms"] = 100 * max(0.0, 1 - busy / seconds / workers)
    return found


def add_links(graph: TaskGraph, workers: int, body) -> None:
    """One more link to a chain of tasks for each worker."""
    loop = f"link {len(graph.tasks)}"
    for worker in range(workers):
        graph.add(loop, body, updates("x", (worker, worker + 1)), loop=loop)


class OwnQueues(Scheduler):
    """A queue for each worker: the tasks that it let go, whose data it has just used; without one it steals."""

    def run(self, iterations: int = 1) -> list:
        """Run all tasks so many times; returns the spans."""
        self._queues = defaultdict(list)
        return super().run(iterations)

    def _push(self, numbers) -> None:
        self._ready = self._queues[threading.get_ident()]
        super()._push(numbers)

    def _pop(self):
        mine = threading.get_ident()
        for queue in [self._queues[mine], *(q for thread, q in self._queues.items() if thread != mine)]:
            self._ready = queue
            if (task := super()._pop()) is not None:
                return task
        return None


def queues(graph: TaskGraph, args) -> dict[str, float]:
    """Seconds of a replay with one queue for all workers, and with a queue for each; they take turns."""
    kinds = {"one queue": Scheduler, "own queues": OwnQueues}
    ways = {
        f"taskiter with {name}, median of seconds": kind(graph, args.workers).run
        for name, kind in kinds.items()
    }
    found = race.race(race.here(ways), args.rounds * args.iterations, warm_up=0)
    return {name: t.median for name, t in found.times.items()}


def dispatch(graph: TaskGraph, args) -> dict[str, float]:
    """What Python and torch's calls cost, inside the tasks of GPT-2 and between them, in microseconds a task.

    Measured with a twin so small that it has nothing to compute: a channel for each head, a token in each row.
    """
    config = PRESETS[args.config]
    narrow = replace(config, n_embd=config.n_head, vocab_size=64)
    give = lambda iteration: (torch.zeros(args.rows, 1, dtype=torch.int64),) * 2
    rows = -(-args.rows // args.workers)
    twin = GPT2Tasks(GPT2(narrow), args.rows, 1, give, Blocks(tokens=rows, rows=rows)).graph
    found = {}
    for workers in sorted({1, args.workers}):
        scheduler = Scheduler(twin, workers)
        seconds = statistics.median(stopwatch(scheduler.run) for _ in range(9)) / len(twin.tasks)
        found[f"replayed by {workers}, GPT-2 with nothing to compute"] = 1e6 * seconds
    scheduler = Scheduler(graph, args.workers)
    iteration = min(stopwatch(scheduler.run) for _ in range(args.rounds))
    found[f"the same, percent of an iteration of {args.config}"] = (
        100 * seconds * len(graph.tasks) / iteration
    )
    return found


def building(args) -> dict[str, float]:
    """Tasks, edges (counted) and milliseconds to build and to replay one layer, as the tokens grow by blocks of 16."""
    found, config = {}, GPT2Config(vocab_size=64, n_positions=16, n_layer=1, n_head=4, n_embd=32)
    for rows in (4, 8, 16, 32):
        give = lambda iteration, rows=rows: (torch.zeros(rows, 16, dtype=torch.int64),) * 2
        make = lambda rows=rows, give=give: GPT2Tasks(GPT2(config), rows, 16, give, Blocks(tokens=16, rows=1))
        build, graph = min(stopwatch(make) for _ in range(3)), make().graph
        scheduler = Scheduler(graph, args.workers)
        size = f"{rows} blocks, {len(graph.tasks)} tasks, {len(list(graph.edges()))} edges"
        found[f"{size}: to build, ms"] = 1e3 * build
        found[f"{size}: to replay, ms"] = 1e3 * min(stopwatch(scheduler.run) for _ in range(3))
    return found


def where_time_goes(graph: TaskGraph, workers: int) -> dict[str, dict[str, float]]:
    """For each way of running tasks the shares of its workers' time in an iteration."""
    scheduler = Scheduler(graph, workers)
    scheduler.run()
    return {
        "sequential": metrics.shares(run_sequential(graph), 1),
        "fork-join": metrics.shares(run_fork_join(graph, workers), workers),
        "taskiter": metrics.shares(scheduler.run(3), workers),
    }
