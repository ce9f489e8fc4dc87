"""Our data parallelism against DistributedDataParallel, our ZeRO-3 against fully_shard.

Each pair runs on the same ranks and takes turns, one thread a rank, so that a busy moment of the machine hits both;
medians count. A step is forward, backward, the sum of gradients and fused AdamW, without clipping.
"""

import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ..machine import memory
from ..model import GPT2, PRESETS
from ..plan import Plan, build
from ..ranks import trace
from ..ranks.mesh import Mesh
from . import race, rivals
from .race import Contest, Heat

PAIRS = {"bucket": "DDP", "zero=3": "fully_shard"}


def run(args) -> dict[str, float]:
    """Print median step times and their ratios, and where a step's time goes."""
    print(
        f"one step of {args.config}, {args.rows} rows of {args.length} tokens a rank, float32, one thread a rank;\n"
        f"{rivals.carriers(args.over)}" + (", our loss in chunks" if args.loss == "chunked" else "")
    )
    return race.run(heats(args), args.rounds)


def heats(args):
    """A heat for each number of ranks and pair."""
    for n in args.ranks:
        for ours in args.pairs:
            given = args.config, ours, args.rows, args.length, args.bucket, args.loss, args.over
            place = Path(args.trace) / f"{args.config}-{n}" if args.trace else None
            yield Heat(f"{{}}, {n} ranks", contest, given, n, (PAIRS[ours],), partial(notes, place))


def notes(place: Path | None, found: race.Outcome) -> dict[str, str]:
    """The milliseconds of one recorded step by kind; with a place the spans of all ranks are saved there."""
    said = {}
    for name, spans in found.facts[0].items():
        took = {kind: f"{1e3 * s:.0f}" for kind, s in seconds(spans).items()}
        said[name] = (
            f"rank 0, one step, ms: forward {took['forward']}, backward {took['backward']}, then waiting "
            f"{took['wait']}, update {took['update']}; messages under way {took['comm']}"
        )
        if place:
            every = trace.merge([of_rank[name] for of_rank in found.facts])
            said[name] += f"; saved {trace.save_chrome(every, place.with_name(f'{place.name}-{name}.json'))}"
    return said


def contest(rank, world_size, config, ours, rows, length, bucket, loss, over) -> Contest:
    """A step of ours and of its rival on one rank; the facts are the spans of one more step of each."""
    config, theirs = PRESETS[config], PAIRS[ours]
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(config.vocab_size, (rows, length + 1), generator=generator)
    plan = Plan.parse(f"dp={world_size},loss={loss},{OPTIONS[ours].format(bucket)}")
    steps = {ours: our_step(config, plan, tokens), theirs: THEIRS[theirs](config, over, tokens)}
    return Contest(steps, facts=lambda: {name: recorded(step) for name, step in steps.items()})


def recorded(step) -> list[trace.Span]:
    """The spans of one step. What PyTorch's own send is known to its profiler, if gloo carries it."""
    trace.clear()
    since_1970 = time.time_ns() - time.perf_counter_ns()
    with memory.profiled() as profile:
        step()
    zero = (profile.profiler.kineto_results.trace_start_ns() - since_1970) * 1e-9
    rank = dist.get_rank()
    sent, at = [e for e in profile.events() if e.name.startswith("gloo:")], lambda us: zero + us * 1e-6
    span = lambda e, took: trace.Span(e.name, "comm", at(took.start), at(took.end), rank, "comm")
    return trace.spans() + [span(e, e.time_range) for e in sent]


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
