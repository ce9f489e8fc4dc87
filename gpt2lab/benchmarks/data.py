"""`gpt2lab bench data`: our data parallelism against DistributedDataParallel, our ZeRO-3 against fully_shard.

Each pair runs on the same ranks and takes turns, one thread a rank, so that a busy moment of the machine hits both;
medians count. A step is forward, backward, the sum of gradients and fused AdamW, without clipping.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..machine import memory
from ..model import GPT2, PRESETS
from ..plan import Plan, build
from ..processes.launch import Ranks
from ..ranks import comm, trace
from ..ranks.mesh import Mesh
from . import rivals
from .step import WARM_UP

PAIRS = (("bucket", "DDP"), ("zero=3", "fully_shard"))


QUICK = "--config nano --rows 2 --steps 3 --ranks 2"  # with --all --quick


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--config", choices=list(PRESETS), default="mini")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default 2 4)")
    parser.add_argument("--rows", type=int, default=4, metavar="B", help="sequences of each rank (default 4)")
    parser.add_argument("--length", type=int, default=64, metavar="T", help="tokens of each (default 64)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each (default 5)")
    parser.add_argument(
        "--bucket", type=int, default=1024, help="KiB of gradients in a message (default 1024)"
    )
    parser.add_argument(
        "--pairs",
        nargs="+",
        choices=[p for p, _ in PAIRS],
        default=[p for p, _ in PAIRS],
        help="what to time",
    )
    parser.add_argument(
        "--trace", metavar="FOLDER", help="save a step of each as Chrome JSON, for ui.perfetto.dev"
    )
    parser.add_argument(
        "--loss",
        choices=["whole", "chunked"],
        default="whole",
        help="how ours computes its loss: whole as PyTorch's own, so that the strategies alone differ (default), or "
        "chunked, as `train` does",
    )
    rivals.add_argument(parser)


def run(args: argparse.Namespace) -> dict[str, float]:
    """Print median step times and their ratios, and where a step's time goes."""
    print(
        f"one step of {args.config}, {args.rows} rows of {args.length} tokens a rank, float32, one thread a rank;\n"
        f"{rivals.carriers(args.over)}" + (", our loss in chunks" if args.loss == "chunked" else "")
    )
    options = args.rows, args.length, args.steps, args.bucket, args.loss, args.over
    seconds = {}
    for n in args.ranks:
        for pair in (p for p in PAIRS if p[0] in args.pairs):
            with Ranks(
                n, timeout=300, echo=False
            ) as pool:  # a pair's memory is given back before the next begins
                per_rank = pool.run(measure, args.config, pair, *options)
            report(n, pair, per_rank[0])
            seconds |= {f"{name}, {n} ranks": per_rank[0][name].median for name in pair}
            for name in pair if args.trace else ():
                spans = trace.merge([found[name].spans for found in per_rank])
                print("   ", trace.save_chrome(spans, Path(args.trace) / f"{args.config}-{n}-{name}.json"))
    return seconds


def report(ranks: int, pair: tuple[str, str], found: dict[str, "Timed"]) -> None:
    """Print the medians of a pair with their ratio, and below the milliseconds of one recorded step by kind."""
    a, b = (found[name].median * 1e3 for name in pair)
    print(f"  {ranks} ranks: {pair[0]:8}{a:8.0f} ms   {pair[1]:12}{b:8.0f} ms   ratio {a / b:.2f}")
    for name in pair:
        took = {kind: f"{1e3 * s:.0f}" for kind, s in seconds(found[name].spans).items()}
        print(
            f"    {name:12} forward {took['forward']}, backward {took['backward']}, then waiting {took['wait']}, "
            f"update {took['update']}; messages under way {took['comm']} (rank 0, one step, ms)",
            flush=True,
        )


@dataclass(frozen=True)
class Timed:
    """Median seconds of a step, and the spans of one recorded step on this rank."""

    median: float
    spans: list[trace.Span]


def measure(rank, world_size, config, pair, rows, length, steps, bucket, loss, over) -> dict[str, Timed]:
    """The steps of both contestants of a pair in turns, the slowest rank's of every step."""
    config, (ours, theirs) = PRESETS[config], pair
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(config.vocab_size, (rows, length + 1), generator=generator)
    plan = Plan.parse(f"dp={world_size},loss={loss},{OPTIONS[ours].format(bucket)}")
    steppers = {ours: our_step(config, plan, tokens), theirs: THEIRS[theirs](config, over, tokens)}
    axis = Mesh(dp=world_size)["dp"]
    times = {name: [] for name in steppers}
    for turn in range(steps + WARM_UP):
        for name, step in steppers.items():
            comm.barrier(axis)
            start = time.perf_counter()
            step()
            took = torch.tensor(time.perf_counter() - start)
            if turn >= WARM_UP:
                times[name].append(comm.all_reduce(took, axis, "max").item())
    return {name: Timed(statistics.median(times[name]), recorded(steppers[name])) for name in steppers}


def recorded(step) -> list[trace.Span]:
    """The spans of one step. What PyTorch's own send is known to its profiler, if gloo carries it."""
    trace.clear()
    since_1970 = time.time_ns() - time.perf_counter_ns()
    with memory.profiled() as profile:
        step()
    zero = (profile.profiler.kineto_results.trace_start_ns() - since_1970) * 1e-9
    rank = dist.get_rank()
    return trace.spans() + [
        trace.Span(
            e.name, "comm", zero + e.time_range.start * 1e-6, zero + e.time_range.end * 1e-6, rank, "comm"
        )
        for e in profile.events()
        if e.name.startswith("gloo:")
    ]


def seconds(spans: list[trace.Span]) -> dict[str, float]:
    """Seconds by kind; messages in progress at the same time count once."""
    found, until = dict.fromkeys(("forward", "backward", "wait", "update", "comm"), 0.0), 0.0
    for s in sorted(spans, key=lambda s: s.start):
        if s.kind == "comm":
            found["comm"] += max(0.0, s.end - max(s.start, until))
            until = max(until, s.end)
        else:
            found[s.kind] += s.end - s.start
    return found


OPTIONS = {"bucket": "data=bucket,bucket={}", "zero=3": "zero=3"}


def our_step(config, plan: Plan, tokens):
    """One step of our strategy as a function without arguments."""
    parallel = build(plan, config, Mesh(dp=plan.dp))
    model, sync = parallel.model, parallel.sync
    optimizer = torch.optim.AdamW([p.tensor for p in sync.pieces], lr=1e-4, fused=True)

    def step():
        sync.last_micro()
        with trace.span("forward", "forward"):
            loss = model.loss(model(tokens[:, :-1]), tokens[:, 1:]) / (tokens[:, 1:].numel() * plan.dp)
        with trace.span("backward", "backward"):
            loss.backward()
        with trace.span("finish", "wait"):
            sync.finish()
        with trace.span("update", "update"):
            optimizer.step()
            sync.updated()
        optimizer.zero_grad()  # now: while the other contestant runs, its memory is needed

    return step


def torch_step(wrapped, model, tokens):
    """One step of a model that PyTorch has wrapped: it divides by the ranks itself, and waits within backward."""
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)

    def step():
        with trace.span("forward", "forward"):
            loss = model.loss(wrapped(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()
        with trace.span("backward", "backward"):
            loss.backward()
        with trace.span("update", "update"):
            optimizer.step()
        optimizer.zero_grad()

    return step


def ddp_step(config, over, tokens):
    """DistributedDataParallel with its own defaults."""
    model = GPT2(config)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=rivals.rival_group(over))
    return torch_step(wrapped, model, tokens)


def fully_shard_step(config, over, tokens):
    """FSDP2 with its own defaults, one shard a block; it keeps activations, where our ZeRO-3 recomputes them."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = GPT2(config), rivals.rival_mesh(over)
    for block in model.h.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch_step(model, model, tokens)


THEIRS = {"DDP": ddp_step, "fully_shard": fully_shard_step}
