"""Our engine compared with torch.distributed.pipelining, on the same stages.

Both hold the same layers on the same ranks, run the same micro-batches forward and backward, and sum the tied embedding
over its two ends. Then the order tables are compared, where the schedules have the same definition.
"""

from dataclasses import replace

import torch
from torch import nn

from ..corpus.batches import Batch
from ..model import GPT2, PRESETS, GPT2Config, token_loss
from ..plan import Plan, build
from ..ranks import comm
from ..ranks.mesh import Mesh
from ..schedules import Schedule, from_csv
from . import race, rivals
from .race import Contest

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
    print(f"one forward and backward of {layers} layers, micro-batches of one row")
    rivals, label = {"ours": ("torch's",)}, "{{}}, {schedules}, {ranks} ranks"
    return race.over_sizes(contest, args, rivals, "schedules", label=label, config=[config])


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


def contest(rank: int, world_size: int, args) -> Contest:
    """Forward and backward of ours and of PyTorch's on one rank; facts: how gradients differ, how orders compare."""
    x, y = rivals.random_batch(args.config, args.micro, args.length)
    batch = Batch(x, y, torch.arange(args.length), torch.arange(args.micro), y.numel())
    plan = Plan.parse(f"pp={world_size},schedule={args.schedules},micro={args.micro}")
    parallel = build(plan, args.config, Mesh(**plan.axes))
    engine, schedule, micros = parallel.engine, parallel.engine.schedule, batch.micro(args.micro)
    stages, rival = torch_schedule(rank, args, schedule, y.numel(), engine.parts.layers)

    def our_step():
        engine.run(micros, None, parallel.sync)
        engine.tie(parallel.sync.pieces, parallel.mesh)

    def their_step():
        last = schedule.depth - 1 in stages
        rival.step(*([x] if 0 in stages else []), **({"target": y} if last else {}))
        if engine.twins is not None:
            (end,) = [stage.wte.weight for n, stage in stages.items() if n in (0, schedule.depth - 1)]
            end.grad = comm.all_reduce(end.grad, engine.twins)

    def release(name):  # while one runs the other's memory is needed
        for module in (parallel.model, *stages.values()):
            module.zero_grad()

    our_step()
    their_step()
    ours = {name: p.grad for name, p in parallel.model.named_parameters()}
    facts = {"by": RIVALS[args.schedules]} | rivals.apart(ours, gradients(stages))
    facts["orders:"] = same_order(schedule, rival, args.schedules)
    return Contest({"ours": our_step, "torch's": their_step}, release, facts=lambda: {"torch's": facts})


def torch_schedule(rank: int, args, schedule: Schedule, total: int, layers):
    """Our stages of this rank as PyTorch's, by number, and PyTorch's schedule over them."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    depth, group = schedule.depth, rivals.rival_group(args.over)
    kind = getattr(schedules, RIVALS[args.schedules])
    mine = {n: Stage(args.config, layers[n], n == 0, n == depth - 1) for n in schedule.stages_of(rank)}
    stages = [
        pipelining.PipelineStage(m, n, depth, torch.device("cpu"), group=group) for n, m in mine.items()
    ]
    loss = lambda logits, target: token_loss(logits, target) / total
    given = stages[0] if issubclass(kind, schedules.PipelineScheduleSingle) else stages
    return mine, kind(given, args.micro, loss_fn=loss, scale_grads=False)


def gradients(stages: dict[int, Stage]) -> dict[str, torch.Tensor]:
    """Theirs by name; those of the embedding's two ends on one rank are added up."""
    found: dict[str, torch.Tensor] = {}
    for stage in stages.values():
        for name, p in stage.named_parameters():
            found[name] = found[name] + p.grad if name in found else p.grad
    return found


def same_order(schedule: Schedule, rival, name: str) -> str:
    """Whether PyTorch's order table is ours; if not, the first rank and operation at which they part, and why."""
    table = rival.pipeline_order or rival._get_pipeline_order()
    kept = [[str(a) for a in table[r] if a is not None and a.is_compute_op] for r in sorted(table)]
    theirs = from_csv("\n".join(",".join(row) for row in kept))
    reason = REASONS.get(name, "unexplained")
    for rank, (a, b) in enumerate(zip(schedule.orders, theirs.orders, strict=True)):
        for n, (ours, other) in enumerate(zip(a, b, strict=False)):
            if ours != other:
                return f"part on rank {rank} at operation {n}: ours {ours}, theirs {other} ({reason})"
    return "the same" if schedule.orders == theirs.orders else "of different lengths"
