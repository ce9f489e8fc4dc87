"""`gpt2lab bench pipeline`: our engine compared with torch.distributed.pipelining, on the same stages.

Both hold the same layers on the same ranks, run the same micro-batches in turns inside the same processes, and sum the
tied embedding over its two ends. Then the order tables are compared, where the schedules have the same definition.
"""

import argparse

import torch
from torch import nn

from ..corpus.batches import Batch
from ..model import GPT2, PRESETS, GPT2Config
from ..parallel.accumulate import Alone
from ..parallel.pipeline.engine import Pipeline
from ..processes.launch import launch
from ..ranks import comm
from ..ranks.mesh import Mesh
from ..schedules import Schedule, from_csv, make
from . import rivals
from .step import medians

RIVALS = {  # our name: PyTorch's class
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
}

REASONS = {  # why the orders differ where they do
    "1f1b": "PyTorch's table counts the last rank's forwards from 1; its own run does not follow it",
    "zb_v": "weight gradients left at the end, which no rank waits for: ours run oldest first",
}


QUICK = "--config nano --vocab 256 --micro 4 --steps 3 --ranks 2 --schedules 1f1b interleaved"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--config", choices=list(PRESETS), default="mini")
    parser.add_argument("--vocab", type=int, default=4096, help="size of the vocabulary (default 4096)")
    parser.add_argument("--micro", type=int, default=8, help="micro-batches, one row each (default 8)")
    parser.add_argument("--length", type=int, default=64, metavar="T", help="tokens of each (default 64)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each (default 5)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="pipeline ranks (default 2 4)")
    parser.add_argument("--schedules", nargs="+", choices=list(RIVALS), default=list(RIVALS))
    rivals.add_argument(parser)


def run(args: argparse.Namespace) -> dict[str, float]:
    """Print medians and ratios for each number of ranks and schedule, gradients' distance, and orders."""
    from dataclasses import replace

    layers = max(PRESETS[args.config].n_layer, 2 * max(args.ranks))
    config = replace(PRESETS[args.config], vocab_size=args.vocab, n_layer=layers)
    print(
        f"one forward and backward of {args.config} with {layers} layers, {args.micro} micro-batches of 1 x "
        f"{args.length}, float32, one thread a rank;\n{rivals.carriers(args.over)}"
    )
    seconds = {}
    for ranks in args.ranks:
        for name in args.schedules:
            job = (race, name, config, args.micro, args.length, args.steps, args.over)
            found = launch(*job, ranks=ranks, timeout=300)
            ours, theirs, apart = (max(values) for values in list(zip(*found, strict=True))[:3])
            seconds |= {f"ours, {name}, {ranks} ranks": ours, f"torch's, {name}, {ranks} ranks": theirs}
            orders = found[0][3]
            reason = "" if orders == "the same" else f" ({REASONS.get(name, 'unexplained')})"
            print(
                f"  {ranks} ranks  {name:12} ours {1e3 * ours:6.0f} ms, {RIVALS[name]:30} {1e3 * theirs:6.0f} ms, "
                f"ratio {ours / theirs:.3f}; gradients differ by {apart:.0e}; orders: {orders}{reason}",
                flush=True,
            )
    return seconds


class Stage(nn.Module):
    """Some layers of a GPT-2 as PyTorch's pipelining wants them: one module, one tensor in, one out."""

    def __init__(self, config: GPT2Config, layers: range, first: bool, last: bool):
        super().__init__()
        whole = GPT2(config)
        self.h = nn.ModuleDict({str(i): whole.h[str(i)] for i in layers})
        self.wte = whole.wte if first or last else None
        self.wpe = whole.wpe if first else None
        self.ln_f = whole.ln_f if last else None

    def forward(self, x):
        """Tokens (b, T) or x (b, T, C) in; x, or the logits, out."""
        positions = torch.arange(x.size(1))
        if self.wpe is not None:
            x = self.wte(x) + self.wpe(positions)
        for block in self.h.values():
            x = block(x, positions)
        return x if self.ln_f is None else nn.functional.linear(self.ln_f(x), self.wte.weight)


def race(rank, world_size, name: str, config: GPT2Config, micros: int, length: int, steps: int, over: str):
    """(our seconds, theirs, largest relative difference of a gradient, how orders compare) on one rank."""
    mesh, schedule = Mesh(pp=world_size), make(name, world_size, micros)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(config.vocab_size, (micros, length + 1), generator=generator)
    x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    batch = Batch(x, y, torch.arange(length), torch.arange(micros), y.numel()).micro(micros)
    model = GPT2(config)
    engine = Pipeline(model, mesh, schedule)
    stages, rival = torch_schedule(
        rank, config, schedule, RIVALS[name], micros, y.numel(), engine.parts.layers, rivals.rival_group(over)
    )

    def our_step():
        engine.run(batch, None, Alone())
        if engine.twins is not None:
            model.wte.weight.grad = comm.all_reduce(model.wte.weight.grad, engine.twins)

    def their_step():
        last = schedule.depth - 1 in stages
        rival.step(*([x] if 0 in stages else []), **({"target": y} if last else {}))
        ends = [stage.wte.weight for n, stage in stages.items() if n in (0, schedule.depth - 1)]
        if engine.twins is not None:
            ends[0].grad = comm.all_reduce(ends[0].grad, engine.twins)

    our_step()
    their_step()
    apart = difference(model, stages)

    def ready():  # while one runs the other's memory is needed, and its drain is not the start of this one
        for module in (model, *stages.values()):
            module.zero_grad()
        comm.barrier(mesh.world)

    ours, theirs = medians(steps, our_step, their_step, before=ready)
    return ours, theirs, apart, same_order(schedule, rival)


def torch_schedule(rank, config, schedule: Schedule, kind: str, micros: int, total: int, layers, group):
    """Our stages of this rank as PyTorch's, by number, and PyTorch's schedule over them."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    depth = schedule.depth
    mine = {n: Stage(config, layers[n], n == 0, n == depth - 1) for n in schedule.stages_of(rank)}
    wrapped = [
        pipelining.PipelineStage(m, n, depth, torch.device("cpu"), group=group) for n, m in mine.items()
    ]
    loss = lambda logits, target: nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="sum"
    ).div(total)
    single = issubclass(getattr(schedules, kind), schedules.PipelineScheduleSingle)
    chosen = getattr(schedules, kind)(
        wrapped[0] if single else wrapped, micros, loss_fn=loss, scale_grads=False
    )
    return mine, chosen


def difference(model: GPT2, stages: dict[int, Stage]) -> float:
    """The largest relative difference of a gradient; the embedding's two ends on one rank are added up."""
    theirs: dict[str, torch.Tensor] = {}
    for stage in stages.values():
        for name, p in stage.named_parameters():
            theirs[name] = theirs[name] + p.grad if name in theirs else p.grad
    pairs = [(p.grad, theirs[name]) for name, p in model.named_parameters()]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def same_order(schedule: Schedule, rival) -> str:
    """Whether PyTorch's order table is ours; if not, the first rank and operation at which they part."""
    table = rival.pipeline_order or rival._get_pipeline_order()
    kept = [[str(a) for a in table[r] if a is not None and a.is_compute_op] for r in sorted(table)]
    theirs = from_csv("\n".join(",".join(row) for row in kept))
    for rank, (a, b) in enumerate(zip(schedule.orders, theirs.orders, strict=True)):
        for n, (ours, other) in enumerate(zip(a, b, strict=False)):
            if ours != other:
                return f"part on rank {rank} at operation {n}: ours {ours}, theirs {other}"
    return "the same" if schedule.orders == theirs.orders else "of different lengths"
