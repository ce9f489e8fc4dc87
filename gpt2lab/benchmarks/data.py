"""`python -m gpt2lab bench data`: our data parallelism beside DistributedDataParallel, our ZeRO-3 beside fully_shard.

All run on the same ranks and take turns, one thread each, so that a busy moment of the machine hits all; medians count.
A step is forward, backward, the sum of gradients and fused AdamW; nobody clips.
"""

import argparse
import statistics
import time

import torch

from ..model import GPT2, PRESETS
from ..plan import Plan, build
from ..ranks import comm
from ..ranks.launch import Ranks
from ..ranks.mesh import Mesh
from . import rivals

PAIRS = (("bucket", "DDP"), ("zero=3", "fully_shard"))


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
    rivals.add_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Print median step times and their ratios."""
    print(
        f"one step of {args.config}, {args.rows} rows of {args.length} tokens a rank, float32, one thread a rank;\n"
        f"{rivals.carriers(args.over)}"
    )
    for n in args.ranks:
        with Ranks(n, timeout=300, echo=False) as pool:
            times = pool.run(
                measure, args.config, args.pairs, args.rows, args.length, args.steps, args.bucket, args.over
            )[0]
        for ours, theirs in PAIRS:
            if ours in times:
                a, b = times[ours] * 1e3, times[theirs] * 1e3
                print(
                    f"  {n} ranks: {ours:8}{a:8.0f} ms   {theirs:12}{b:8.0f} ms   ratio {a / b:.2f}",
                    flush=True,
                )
    return 0


def measure(rank, world_size, config, pairs, rows, length, steps, bucket, over) -> dict[str, float]:
    """Median seconds of a step of each contestant, the slowest rank's of every step."""
    config = PRESETS[config]
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(config.vocab_size, (rows, length + 1), generator=generator)
    steppers = {}
    for ours, theirs in PAIRS:
        if ours in pairs:
            steppers[ours] = our_step(
                config, Plan.parse(f"dp={world_size},{OPTIONS[ours]},bucket={bucket}"), tokens
            )
            steppers[theirs] = THEIRS[theirs](config, over, tokens)
    axis = Mesh(dp=world_size)["dp"]
    times = {name: [] for name in steppers}
    for turn in range(steps + 1):
        for name, step in steppers.items():
            comm.barrier(axis)
            start = time.perf_counter()
            step()
            took = torch.tensor(time.perf_counter() - start)
            if turn:  # the first is for warming up
                times[name].append(comm.all_reduce(took, axis, "max").item())
    return {name: statistics.median(t) for name, t in times.items()}


OPTIONS = {"bucket": "data=bucket", "zero=3": "zero=3"}


def our_step(config, plan: Plan, tokens):
    """One step of our strategy as a function without arguments."""
    parallel = build(plan, config, Mesh(dp=plan.dp))
    model, sync = parallel.model, parallel.sync
    optimizer = torch.optim.AdamW([p.tensor for p in sync.pieces], lr=1e-4, fused=True)

    def step():
        optimizer.zero_grad()
        sync.last_micro()
        (model.loss(model(tokens[:, :-1]), tokens[:, 1:]) / (tokens[:, 1:].numel() * plan.dp)).backward()
        sync.finish()
        optimizer.step()
        sync.updated()

    return step


def torch_step(wrapped, model, tokens):
    """One step of a model that PyTorch has wrapped: it divides by the ranks itself."""
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)

    def step():
        optimizer.zero_grad()
        (model.loss(wrapped(tokens[:, :-1]), tokens[:, 1:]) / tokens[:, 1:].numel()).backward()
        optimizer.step()

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
