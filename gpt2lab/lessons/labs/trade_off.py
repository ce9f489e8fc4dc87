"""Every strategy as a point: bytes held and sent by a rank, messages, operations done twice. Counted, and computed.

python -m gpt2lab.lessons.labs.trade_off    counts all on 2, 4 and 8 live ranks and writes trade_off.json
"""

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ...machine import memory
from ...model import GPT2Config
from ...plan import Plan, build
from ...planner.memory import fullest
from ...planner.sends import sends
from ...planner.share import RankShare
from ...processes.launch import Ranks
from ...ranks import comm
from ...ranks.mesh import Mesh
from ...reference import example_batch
from ...train import Trainer

STRATEGIES = {
    "data": "dp={n}",
    "data, recompute": "dp={n},recompute=on",
    "ZeRO-1": "dp={n},zero=1",
    "ZeRO-2": "dp={n},zero=2",
    "ZeRO-3": "dp={n},zero=3",
    "tensor": "tp={n}",
    "tensor, sequence": "tp={n},sp=on",
    "pipeline, GPipe": "pp={n},micro={m},schedule=gpipe",
    "pipeline, 1F1B": "pp={n},micro={m}",
    "pipeline, ZB-H1": "pp={n},micro={m},schedule=zb_h1",
    "context, ring": "cp={n},layout=zigzag,exchange=ring",
    "context, heads": "cp={n},exchange=heads",
}
"""The plan of each strategy on n ranks; a pipeline gets m micro-batches, twice as many as stages."""

RANKS = 2, 4, 8
RECORD = Path(__file__).with_suffix(".json")
SMALL, ROWS, TOKENS = GPT2Config(vocab_size=256, n_positions=16, n_layer=8, n_head=8, n_embd=32), 16, 16
"""What is counted: on 8 ranks still a head, a layer and two rows a rank."""
WITH_WEIGHTS = {op: flop_registry[op] for op in (torch.ops.aten.mm, torch.ops.aten.addmm)}


@dataclass(frozen=True)
class Point:
    """What the rank with most of it has: bytes held and sent, messages; operations of all ranks over serial's."""

    held: int
    sent: int
    messages: int
    flops: float = 0.0


class Products(TorchDispatchMode):
    """Counts the operations of all products with a matrix of weights; those of attention, which are batched, apart."""

    flops = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        """Run an operator, and add what torch's own formula says of it."""
        out = operator(*args, **(kwargs or {}))
        if formula := WITH_WEIGHTS.get(operator.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def plan_of(strategy: str, ranks: int) -> Plan:
    """The plan of a strategy on so many ranks."""
    return Plan.parse(STRATEGIES[strategy].format(n=ranks, m=2 * ranks))


def count_step(rank: int, world_size: int, plan: Plan, config: GPT2Config, rows: int, length: int) -> Point:
    """Count on this rank: what the allocator gave, what the log says was sent, operations of matrix products."""
    mesh, batch = Mesh(**plan.axes), example_batch(config, rows, length)
    with memory.allocations() as before:
        trainer = Trainer(build(plan, config, mesh))
        comm.clear_log()
        with Products() as products:
            trainer.step(batch)
    sent, messages = (sum(getattr(e, what) for e in comm.log) for what in ("bytes", "messages"))
    with memory.allocations() as during:
        trainer.step(batch)
    return Point(before[-1].held + max(a.held for a in during), sent, messages, products.flops)


def count_all(rank: int, world_size: int, plans, config: GPT2Config, rows: int, length: int) -> list[Point]:
    """`count_step` of one plan after the other."""
    return [count_step(rank, world_size, plan, config, rows, length) for plan in plans]


def most(points: list[Point], serial: Point) -> Point:
    """One point of what all ranks counted: the most of bytes and messages, all operations over those of serial."""
    tops = [max(getattr(p, what) for p in points) for what in ("held", "sent", "messages")]
    return Point(*tops, sum(p.flops for p in points) / serial.flops)


def count(strategies, ranks: int, config: GPT2Config, rows: int, length: int, pool) -> dict[str, Point]:
    """Each strategy's point, counted on the live ranks of a pool."""
    serial = count_step(0, 1, Plan(), config, rows, length)
    found = pool.run(count_all, [plan_of(s, ranks) for s in strategies], config, rows, length)
    by_strategy = zip(strategies, zip(*found, strict=True), strict=True)
    return {s: most(list(points), serial) for s, points in by_strategy}


def recorded() -> dict[int, dict[str, Point]]:
    """What live ranks counted when the record was written: by number of ranks and strategy."""
    found = json.loads(RECORD.read_text())
    return {int(n): {name: Point(**point) for name, point in points.items()} for n, points in found.items()}


@cache
def compute(strategy: str, ranks: int, config: GPT2Config, rows: int, length: int) -> Point:
    """The same by formula, for any number of ranks."""
    plan = plan_of(strategy, ranks) if ranks > 1 else Plan()
    share = RankShare(plan, config, rows, length)
    shares = [replace(share, **place) for place in busiest_places(plan)]
    stages = (replace(share, pp=stage) for stage in range(plan.pp))
    deepest = max(stages, key=lambda one: len(one.parts.blocks))
    most_of = lambda what: max(sum(getattr(s, what) for s in sends(one)) for one in shares)
    held = max(h.total for h in fullest({*shares, deepest}))
    return Point(held, most_of("bytes"), most_of("messages"), operations(plan, config, length))


def busiest_places(plan: Plan) -> list[dict[str, int]]:
    """The ranks among which the one that sends most is: the first, the second and the last of the plan's only axis."""
    (axis,) = [name for name in ("pp", "dp", "cp", "tp") if getattr(plan, name) > 1] or ["dp"]
    return [{axis: i} for i in sorted({0, min(1, plan.world - 1), plan.world - 1})]


def operations(plan: Plan, config: GPT2Config, length: int) -> float:
    """Operations of matrix products over those of the serial run: blocks that run again add a third of theirs."""
    blocks, head = 12 * config.n_layer * config.n_embd, config.vocab_size  # times C, a token
    return 1 + RankShare(plan, config, plan.dp * plan.micro, length).again[0] * blocks / (3 * (blocks + head))


def main() -> None:
    """Write the record."""
    found = {}
    for ranks in RANKS:
        with Ranks(ranks) as pool:
            counted = count(STRATEGIES, ranks, SMALL, ROWS, TOKENS, pool)
        found[ranks] = {name: asdict(point) for name, point in counted.items()}
        RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    from . import trade_off  # under its own name, by which ranks find its functions

    trade_off.main()
