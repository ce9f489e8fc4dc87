"""Which weights are whole on a rank, and when: ZeRO's gathers and releases, written down as they happen."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from ...machine import memory
from ...model import GPT2
from ...parallel.zero.costs import bytes_held, messages_sent, parts, shard_length
from ...parallel.zero.flat import part_of
from ...ranks import comm
from ...reference import example_batch
from ...train import Trainer
from .instruments import trainer_by


@dataclass
class Residency:
    """The comings and goings on one rank: event i (from 1) leaves `held[i]` bytes of weights, shards included.

    `held` counts memory that is allocated, and the buffers of weights that are being gathered.
    """

    spans: dict[str, list] = field(default_factory=dict)  # of each part: (asked for, here, gone), in events
    owned: list[str] = field(default_factory=list)  # parts of which this rank's shard is all
    marks: dict[str, float] = field(default_factory=dict)  # what else happened: between which events
    held: list[int] = field(default_factory=list)  # bytes, at first before any event
    blocks: list[int] = field(default_factory=list)  # the same of the blocks alone

    def mark(self, text: str) -> None:
        """Remember that something begins now."""
        self.marks[text] = len(self.held) - 0.5

    def under_way(self) -> int:
        """How often a part was being gathered while a block's weights were whole."""
        every = [(part, span) for part, spans in self.spans.items() for span in spans]
        whole = [(here, gone) for part, (_, here, gone) in every if part.startswith("h.")]
        return sum(any(here < asked < gone for here, gone in whole) for _, (asked, _, _) in every)


@contextmanager
def watched(sync) -> Iterator[Residency]:
    """Write down what the weights of a ZeRO strategy (`sync`) do inside the block."""
    seen, alive = Residency(), {f: memory.Alive() for f in sync.flats}
    name = {f: part_of(f.names[0]) for f in sync.flats}
    seen.owned = [name[f] for f in sync.flats if f.length == sum(f.lengths)]
    since = {}

    def note():
        room = {f: sum(f.lengths) * f.shard.element_size() if f.coming else 0 for f in sync.flats}
        bytes_of = {f: memory.bytes_of([f.shard]) + alive[f].bytes() + room[f] for f in sync.flats}
        seen.held.append(sum(bytes_of.values()))
        seen.blocks.append(sum(size for f, size in bytes_of.items() if name[f].startswith("h.")))

    def then(right, f):
        """Do the right thing; write down what it changed."""
        asked, whole = f.coming is not None, f.full is not None
        right()
        now = len(seen.held)
        if whole and f.full is None:
            seen.spans[name[f]].append((*since.pop(f), now))
        elif f.full is not None and not whole:
            alive[f].watch(f.full)
            since[f] = *since[f], now
        elif f.coming is not None and not asked:
            seen.spans.setdefault(name[f], [])
            since[f] = (now,)
        else:
            return
        note()

    note()
    for f in sync.flats:
        for call in ("start_gather", "gather", "drop"):
            setattr(f, call, partial(then, getattr(f, call), f))
    try:
        yield seen
    finally:
        for f in sync.flats:
            for call in ("start_gather", "gather", "drop"):
                delattr(f, call)


def of_a_step(trainer, batch) -> Residency:
    """What happens on this rank in a step of one micro-batch, without its update."""
    parallel = trainer.parallel
    [micro] = parallel.mine(batch)
    with watched(parallel.sync) as seen:
        loss = parallel.model.loss(parallel.model(micro.tokens), micro.targets) / batch.total
        seen.mark("backward begins")
        loss.backward()
        parallel.sync.finish()
    return seen


def trainer_of(text: str, config) -> tuple[Trainer, object]:
    """On a rank: a trainer for the plan in float64, and a batch of 7 rows; bytes sent are counted from here on."""
    trainer = trainer_by(text, config)
    comm.clear_log()
    return trainer, example_batch(config, 7, 11)


def _sent() -> int:
    return sum(size for (_, axis), (_, size, _) in comm.traffic().items() if axis == "dp+cp")


def sent(rank: int, world_size: int, text: str, config) -> int:
    """Bytes that this rank sends in a step."""
    trainer, batch = trainer_of(text, config)
    trainer.step(batch)
    return _sent()


def watch(rank: int, world_size: int, text: str, config, prefetch: bool = True):
    """What happens in a step, the bytes sent, and this rank's gradients."""
    trainer, batch = trainer_of(text, config)
    trainer.parallel.sync.prefetch &= prefetch
    seen = of_a_step(trainer, batch)
    return seen, _sent(), [p.tensor.grad for p in trainer.parallel.sync.pieces]


def weights_behind(rank: int, world_size: int, text: str, config):
    """Of a step: forwards of blocks, bytes sent, bytes behind the blocks' weights after forward, and gradients."""
    trainer, batch = trainer_of(text, config)
    parallel, runs = trainer.parallel, []
    [micro], blocks = parallel.mine(batch), parallel.model.h.values()
    for block in blocks:
        block.register_forward_hook(lambda *_: runs.append(1))
    loss = parallel.model.loss(parallel.model(micro.tokens), micro.targets) / batch.total
    held = memory.bytes_of([p.data for block in blocks for p in block.parameters()])
    loss.backward()
    parallel.sync.finish()
    return len(runs), _sent(), held, [p.tensor.grad for p in parallel.sync.pieces]


def messages(rank: int, world_size: int, text: str, config) -> tuple[list[int], torch.Tensor]:
    """Bytes of each sum of gradients that this rank sends in a step, and its gradients, whole and flat."""
    trainer, batch = trainer_of(text, config)
    trainer.gradients(batch)
    sums = ("all_reduce", "reduce_scatter")
    sizes = [e.bytes for e in comm.log if e.op in sums and e.axis == "dp+cp" and e.bytes > 8]
    return sizes, torch.cat([g.flatten() for g in trainer.parallel.gradients().values()])


def three_ways(ranks, config) -> tuple[dict[str, Residency], list[tuple], dict[str, bool]]:
    """Stage 3 on two live ranks: with prefetch, without, and with owners of whole layers.

    What each one saw; rows of a table (blocks on a rank, most held, fetched while computing, bytes sent); checks.
    """
    block = 8 * parts(GPT2(config))["h.0"]
    on, off = (ranks.run(watch, "dp=2,zero=3", config, prefetch) for prefetch in (True, False))
    owners = ranks.run(watch, "dp=2,zero=3,data=owner", config)
    runs = {"flat, prefetch": on[0], "flat, no prefetch": off[0]}
    runs |= {f"layers, rank {rank}": owners[rank] for rank in range(2)}
    rows = [
        (name, seen.blocks[0] / block, max(seen.blocks) / block, seen.under_way(), size)
        for name, (seen, size, _) in runs.items()
    ]
    peaks = [max(seen.blocks) == seen.blocks[0] + block for seen, _, _ in owners + off]
    same = all(map(torch.equal, on[0][2], off[0][2]))
    said = {
        "without prefetch the peak is one's own and one block, to the byte, on all ranks": all(peaks),
        "with prefetch the same gradients, bit for bit": same,
    }
    return {name: seen for name, (seen, _, _) in runs.items()}, rows, said


def by_message(ranks, config) -> tuple[list[tuple], bool]:
    """Sums of gradients on two live `ranks` in three packings.

    Rows: (name, messages, smallest, largest, all as by formula); and whether the gradients are the same bits.
    """
    flat = [8 * shard_length(size, 2) for size in parts(GPT2(config)).values()]
    ways = {
        "tensor by tensor": ("dp=2,bucket=0", messages_sent(GPT2(config), 0, 2, 0)),
        "buckets of 64 KiB": ("dp=2,bucket=64", messages_sent(GPT2(config), 64 << 10, 2, 0)),
        "flat parts, sharded": ("dp=2,zero=2", flat),
    }
    rows, gradients = [], []
    for name, (plan, formula) in ways.items():
        sizes, gradient = ranks.run(messages, plan, config)[0]
        rows.append((name, len(sizes), min(sizes), max(sizes), str(sorted(sizes) == sorted(formula))))
        gradients.append(gradient)
    return rows, all(torch.equal(g, gradients[0]) for g in gradients)


def held_by_stage(ranks, config, stages: dict[int, str]):
    """By stage the bytes of each kind on rank 0 by formula, those held live, and whether all ranks agree with it."""
    held = lambda rank, world_size, plan: memory.after_backward(*trainer_of(plan, config))
    n, formula, live, exact = ranks.size, {}, {}, []
    for stage, name in stages.items():
        found = ranks.run(held, f"dp={n},zero={stage}")
        expected = [bytes_held(parts(GPT2(config)), stage, n, rank, 8) for rank in range(n)]
        exact.append(found == expected)
        formula[name], live[name] = expected[0], sum(found[0].values())
    return formula, live, all(exact)
