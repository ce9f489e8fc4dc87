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

from ..machine.speed import using_threads
from ..machine.timing import alone, stopwatch, trials
from ..model import GPT2, PRESETS, GPT2Config
from ..planner import metrics
from ..processes.launch import Ranks, kept
from ..ranks import comm
from ..ranks.mesh import Mesh
from ..tasks.gpt2 import Blocks, GPT2Tasks, adamw
from ..tasks.graph import TaskGraph, updates
from ..tasks.runtime import run_fork_join, run_sequential
from ..tasks.scheduler import Scheduler, run_tasks
from . import race, rivals
from .race import Contest, Heat
from .races import VERSIONS

PUBLISHED = {"sequential": 35.0, "fork-join": 1.430, "fork-join over nOS-V": 1.616}
"""Seconds of an iteration on 112 CPUs (from the wiki of the port): OpenMP, and the same over nOS-V."""


def run(args) -> dict[str, float]:
    """Run the protocol, print the table, write JSON and dashboard; returns mean seconds by version."""
    from ..plots import tasks as plots

    if args.rows < args.workers or args.iterations < 2:
        raise ValueError(
            f"{args.rows} rows, {args.workers} workers, {args.iterations} iterations: "
            "take at least a row a worker and 2 iterations."
        )
    found = {name: [] for name in (VERSIONS if args.all else args.versions)}
    told, keep = lambda: summary(found, args.workers), lambda name, seconds: found[name].append(seconds)
    graph = one_process(args).graph
    with Ranks(args.workers, echo=False, timeout=600) as ranks:
        ways = {name: version(name, graph, args, ranks) for name in found}
        race.run([Heat("{}", Contest(ways, after=keep, own=True, facts=told))], args.rounds, warm_up=0)
    report = {"options": vars(args), "versions": told(), "published": PUBLISHED, "seconds": found}
    if args.all:
        report["profile"] = {}
        report["costs"] = race.run(extra_heats(graph, args, report["profile"]), args.rounds, warm_up=1)
    race.save_race(args.out, args.config, report, plots.dashboard(found, args.workers, PUBLISHED))
    return {name: row["mean"] for name, row in report["versions"].items()}


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
    batch = rivals.random_batch(PRESETS[args.config], args.rows, args.length)
    return lambda iteration: batch


def one_process(args) -> GPT2Tasks:
    """The tasks of one process, with a block of tokens for each worker."""
    rows = -(-args.rows // args.workers)
    blocks = Blocks(tokens=rows * args.length, rows=rows)
    return GPT2Tasks(GPT2(PRESETS[args.config]), args.rows, args.length, batches(args), blocks)


def version(name: str, graph: TaskGraph, args, ranks: Ranks):
    """A function that runs an iteration so many times in one of the ways and returns the seconds of each."""
    n = args.iterations
    if name == "ranks x tasks":
        return lambda: ranks.run(on_rank, args)[0]
    if name == "taskiter":
        run = Scheduler(graph, args.workers).run
        return lambda: [stopwatch(run), *[stopwatch(run, n - 1) / (n - 1)] * (n - 1)]
    once = {
        "sequential": lambda: run_sequential(graph),
        "fork-join": lambda: run_fork_join(graph, args.workers),
        "tasks": lambda: run_tasks(rebuilt(graph), args.workers),
    }.get(name) or torch_threads(args)
    return lambda: [stopwatch(once) for _ in range(n)]


def torch_threads(args):
    """The rival: GPT-2 as it is, with autograd and fused AdamW, and threads inside every operation of torch."""
    model, (tokens, targets) = GPT2(PRESETS[args.config]), batches(args)(0)
    loss = lambda: model.loss(model(tokens), targets) / targets.numel()
    step = rivals.training_step(loss, adamw(list(model.parameters())))

    def in_threads():
        with using_threads(args.workers):
            step()

    return in_threads


def on_rank(rank: int, world_size: int, args) -> list[float]:
    """Seconds of every iteration on ranks of one worker each, that share the rows and sum gradients by tasks."""
    axis = Mesh(dp=world_size)["dp"]
    if "tasks" not in kept:
        mine = torch.arange(args.rows).tensor_split(world_size)[rank]
        give = lambda iteration: [part[mine] for part in batches(args)(iteration)]
        options = {"total": args.rows * args.length, "axis": axis}
        model = GPT2(PRESETS[args.config])
        kept["tasks"] = GPT2Tasks(model, len(mine), args.length, give, Blocks(tokens=0, rows=0), **options)
    run = Scheduler(kept["tasks"].graph, 1).run
    return list(alone(trials(run, args.iterations, 0, ready=lambda: comm.barrier(axis))).trials)


def rebuilt(graph: TaskGraph) -> TaskGraph:
    """The same tasks in a new graph, as a program has it that declares them anew in every iteration."""
    new = TaskGraph(graph.tensors)
    for t in graph.tasks:
        new.add(t.name, t.body, *t.accesses, loop=t.loop, kind=t.kind, priority=t.priority, wire=t.wire)
    return new


def extra_heats(graph: TaskGraph, args, profile: dict):
    """What tasks cost besides their work, as heats; the shares of the workers' time are also put into `profile`."""
    n, empty = args.workers, chains(args.workers, 1000, lambda x: None)
    ways = {
        "to build": lambda: chains(n, 1000, lambda x: None),
        "in program order": lambda: run_sequential(empty),
        f"in fork-join, a barrier for each {n}": lambda: run_fork_join(empty, n),
        "replayed by workers": Scheduler(empty, n).run,
    }
    yield Heat("1000 empty tasks, {}", Contest(ways))
    kinds = {"one queue": Scheduler, "own queues": OwnQueues}
    queues = {name: kind(graph, n).run for name, kind in kinds.items()}
    yield Heat("taskiter with {}", Contest(queues), rivals={"own queues": ("one queue",)})
    config = PRESETS[args.config]
    rows, narrow = -(-args.rows // n), replace(config, n_embd=config.n_head, vocab_size=64)
    # A channel for each head, a token in each row.
    twin = untrained(narrow, args.rows, 1, Blocks(tokens=rows, rows=rows))
    ways = {f"{w} workers, nothing to compute": Scheduler(twin, w).run for w in sorted({1, n})}
    ways[args.config] = Scheduler(graph, n).run
    whole = {name: (args.config,) for name in ways if name != args.config}
    yield Heat(f"{len(twin.tasks)} tasks of GPT-2, {{}}", Contest(ways), rivals=whole)
    small = GPT2Config(vocab_size=64, n_positions=16, n_layer=1, n_head=4, n_embd=32)
    for rows in (4, 8, 16, 32):  # the tokens grow by blocks of 16
        make = partial(untrained, small, rows, 16, Blocks(tokens=16, rows=1))
        made = make()
        size = f"{rows} blocks, {len(made.tasks)} tasks, {len(list(made.edges()))} edges"
        yield Heat(f"{size}, {{}}", Contest({"to build": make, "to replay": Scheduler(made, n).run}))
    yield Heat("where time goes, {}", time_shares(graph, n, profile))


def chains(workers: int, tasks: int, body) -> TaskGraph:
    """A chain of tasks for each worker, so many together."""
    graph = TaskGraph({"x": torch.zeros(workers)})
    for link in range(tasks // workers):
        for worker in range(workers):
            graph.add(f"link {link}", body, updates("x", (worker, worker + 1)), loop=f"link {link}")
    return graph


def untrained(config: GPT2Config, rows: int, length: int, blocks: Blocks) -> TaskGraph:
    """The tasks of an iteration whose text is all the same word."""
    give = lambda iteration: (torch.zeros(rows, length, dtype=torch.int64),) * 2
    return GPT2Tasks(GPT2(config), rows, length, give, blocks).graph


def time_shares(graph: TaskGraph, workers: int, profile: dict) -> Contest:
    """Ways of running tasks; facts: the percent of their workers' time that each kind of work and waiting has."""
    a = torch.randn(384, 384)
    products = round(1e-3 / min(stopwatch(lambda: a @ a) for _ in range(20)))
    long = chains(workers, 100, lambda x: [a @ a for _ in range(max(1, products))])
    runs = {
        "sequential": lambda: run_sequential(graph),
        "fork-join": lambda: run_fork_join(graph, workers),
        "taskiter": partial(Scheduler(graph, workers).run, 3),
        "tasks of 1 ms": partial(Scheduler(long, workers).run, 5),
    }

    def keep(name, spans):
        parts = metrics.shares(spans, 1 if name == "sequential" else workers)
        profile[name] = {f"{kind}, percent": 100 * share for kind, share in parts.items()}

    return Contest(runs, after=keep, facts=lambda: profile)


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
