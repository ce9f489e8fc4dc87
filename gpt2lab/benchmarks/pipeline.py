"""Our engine compared with torch.distributed.pipelining, on the same stages.

Both hold the same layers on the same ranks, run the same micro-batches in turns inside the same processes, and sum the
tied embedding over its two ends. Then the order tables are compared, where the schedules have the same definition.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..corpus.batches import Batch
from ..model import GPT2, PRESETS, GPT2Config, token_loss
from ..parallel.accumulate import Alone
from ..parallel.pipeline.engine import Pipeline
from ..ranks import comm
from ..ranks.mesh import Mesh
from ..schedules import Schedule, from_csv, make
from ..verify import relative_error
from . import race, rivals
from .race import Contest, Heat

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


def run(args) -> dict[str, float]:
    """Print medians and ratios for each number of ranks and schedule, gradients' distance, and orders."""
    layers = max(PRESETS[args.config].n_layer, 2 * max(args.ranks))
    config = replace(PRESETS[args.config], vocab_size=args.vocab, n_layer=layers)
    print(
        f"one forward and backward of {args.config} with {layers} layers, {args.micro} micro-batches of 1 x "
        f"{args.length}, float32, one thread a rank;\n{rivals.carriers(args.over)}"
    )
    return race.run(heats(args, config), args.rounds)


def heats(args, config: GPT2Config):
    """A heat for each number of ranks and schedule."""
    for n in args.ranks:
        for name in args.schedules:
            given = name, config, args.micro, args.length, args.over
            yield Heat(f"{{}}, {name}, {n} ranks", contest, given, n, ("torch's",), partial(notes, name))


def notes(name: str, found: race.Outcome) -> dict[str, str]:
    """How far gradients are apart, and how the orders compare."""
    orders = found.facts[0][1]
    reason = "" if orders == "the same" else f" ({REASONS.get(name, 'unexplained')})"
    apart = max(fact[0] for fact in found.facts)
    return {"torch's": f"{RIVALS[name]}; gradients differ by {apart:.0e}; orders: {orders}{reason}"}


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


def contest(rank, world_size, name: str, config: GPT2Config, micros: int, length: int, over: str) -> Contest:
    """A step of ours and of PyTorch's on one rank; facts: the gradients' largest difference, how orders compare."""
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

    def release(name):  # while one runs the other's memory is needed
        for module in (model, *stages.values()):
            module.zero_grad()

    facts = apart, same_order(schedule, rival)
    return Contest({"ours": our_step, "torch's": their_step}, before=release, facts=lambda: facts)


def torch_schedule(rank, config, schedule: Schedule, kind: str, micros: int, total: int, layers, group):
    """Our stages of this rank as PyTorch's, by number, and PyTorch's schedule over them."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    depth = schedule.depth
    mine = {n: Stage(config, layers[n], n == 0, n == depth - 1) for n in schedule.stages_of(rank)}
    wrapped = [
        pipelining.PipelineStage(m, n, depth, torch.device("cpu"), group=group) for n, m in mine.items()
    ]
    loss = lambda logits, target: token_loss(logits, target) / total
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
    return max(relative_error(p.grad, theirs[name]) for name, p in model.named_parameters())


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
