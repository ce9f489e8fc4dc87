"""Our data parallelism against DistributedDataParallel, our ZeRO-3 against fully_shard.

A step is forward, backward, the sum of gradients and fused AdamW, without clipping. One more step of each is recorded
and says where the time goes.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..machine import memory
from ..model import GPT2, PRESETS, GPT2Config
from ..ranks import trace
from . import race, rivals
from .race import Contest

PAIRS = {"bucket": "DDP", "zero=3": "fully_shard"}
KINDS = {"wait": "one step, ms: waiting"} | {kind: kind for kind in ("forward", "backward", "update")}
KINDS["comm"] = "messages under way"
OPTIONS = {"bucket": "data=bucket,bucket={}", "zero=3": "zero=3"}


def run(args) -> dict[str, float]:
    """Print median step times and their ratios, and where a step's time goes."""
    return race.over_sizes(contest, args, {ours: (theirs,) for ours, theirs in PAIRS.items()}, "pairs")


def contest(rank: int, world_size: int, args) -> Contest:
    """A step of ours and of its rival on one rank; the facts are where the time of one more step of each goes."""
    config, theirs = PRESETS[args.config], PAIRS[args.pairs]
    x, y = rivals.random_batch(config, args.rows, args.length, seed=rank)
    plan = f"dp={world_size},loss={args.loss},{OPTIONS[args.pairs].format(args.bucket)}"
    _, ours = rivals.our_step(plan, config, x, y, y.numel() * world_size)
    model, wrapped = WRAPPED[theirs](config, args.over)
    loss = lambda: model.loss(wrapped(x), y) / y.numel()  # PyTorch divides by the ranks itself
    steps = {args.pairs: ours, theirs: rivals.training_step(loss, rivals.fused_adamw(wrapped.parameters()))}
    return Contest(steps, facts=lambda: {name: ms_by_kind(recorded(step)) for name, step in steps.items()})


def ddp(config: GPT2Config, over: str):
    """(the model, DistributedDataParallel with its own defaults around it)."""
    model = GPT2(config)
    return model, torch.nn.parallel.DistributedDataParallel(model, process_group=rivals.rival_group(over))


def sharded(config: GPT2Config, over: str):
    """FSDP2 with its own defaults, one shard a block; it keeps activations, where our ZeRO-3 recomputes them."""
    from torch.distributed.fsdp import fully_shard

    model, mesh = GPT2(config), rivals.rival_mesh(over)
    for block in model.h.values():
        fully_shard(block, mesh=mesh)
    return model, fully_shard(model, mesh=mesh)


WRAPPED = {"DDP": ddp, "fully_shard": sharded}


def recorded(step: Callable) -> list[trace.Span]:
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


def ms_by_kind(spans: list[trace.Span]) -> dict[str, float]:
    """Milliseconds by kind; messages in progress at the same time count once."""
    took = lambda kind: 1e3 * rivals.covered(s for s in spans if s.kind == kind)
    return {words: took(kind) for kind, words in KINDS.items()}
