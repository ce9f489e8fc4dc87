"""One iteration of GPT-2 run in six ways: program order, torch's own threads, fork-join, tasks, replayed tasks, ranks.

The protocol is that of the port of llm.c at the Barcelona Supercomputing Center: so many runs of so many iterations,
without validation or generation, the first iteration apart. Versions take turns. Written: a JSON file, and a dashboard
with the published figures (112 CPUs) beside.
"""

import statistics

import torch

from ..machine.speed import using_threads
from ..machine.timing import alone, stopwatch, trials
from ..model import GPT2, PRESETS
from ..planner import metrics
from ..processes.launch import Ranks, kept
from ..ranks import comm
from ..ranks.mesh import Mesh
from ..tasks.gpt2 import Blocks, GPT2Tasks, adamw
from ..tasks.graph import TaskGraph
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
    found = {name: [] for name in args.versions}
    told, keep = lambda: summary(found, args.workers), lambda name, seconds: found[name].append(seconds)
    graph = one_process(args).graph
    with Ranks(args.workers, echo=False, timeout=600) as ranks:
        ways = {name: version(name, graph, args, ranks) for name in found}
        race.run([Heat("{}", Contest(ways, after=keep, own=True, facts=told))], args.rounds, warm_up=0)
    report = {"options": vars(args), "versions": told(), "published": PUBLISHED, "seconds": found}
    race.save_race(args.out, args.config, report, plots.dashboard(found, args.workers, PUBLISHED))
    return {name: row["mean"] for name, row in report["versions"].items()}


def summary(found: dict, workers: int) -> dict[str, dict[str, float]]:
    """Mean seconds without first iterations, spread over the runs, the first alone; speed-up and what follows."""
    rows, means = {}, {name: [statistics.mean(run[1:]) for run in runs] for name, runs in found.items()}
    serial = statistics.mean(means[VERSIONS[0]]) if VERSIONS[0] in found else None
    for name, runs in found.items():
        row = {"mean": statistics.mean(means[name]), "spread": max(means[name]) - min(means[name])}
        row["first"] = statistics.mean(run[0] for run in runs)
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
