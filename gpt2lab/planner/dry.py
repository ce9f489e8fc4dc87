"""A dry run: one rank's own step on tensors without numbers, to see what it sends and what it holds.

The plan's model is built and trained by the code that live ranks run; so a new strategy is counted without a line here.
What one rank cannot know it is told: others answer at once, a loss is 1, tokens go to experts evenly.

The tests compare every call with those of live ranks, and memory with what their allocator counted. What torch itself
keeps is not in it, nor messages in shared memory.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from unittest.mock import patch

import torch

from ..corpus.batches import Batch
from ..experts import mixture
from ..machine.arguments import checked
from ..machine.patience import patiently
from ..plan import Plan, build
from ..ranks import comm
from ..ranks.mesh import Mesh
from ..ranks.traffic import split_sizes
from ..train import Recipe, Trainer
from ..transport.pretended import one_of
from .experts import rows_of
from .numberless import PARTS, numberless
from .sends import AxisTraffic, by_axis

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True)
class DryRank:
    """What one rank does in a step: its `place` in the mesh, its calls in order, and its fullest moment.

    `calls` are (operation, axis, bytes, messages); `parts` are bytes held at the fullest moment, by what they are for;
    the `moment` is in "forward", "backward" or "update".
    """

    place: dict[str, int]
    calls: tuple[tuple[str, str, int, int], ...]
    parts: dict[str, int]
    moment: str

    @property
    def sent(self) -> dict[str, tuple[int, int]]:
        """(bytes, messages) by axis."""
        return by_axis(AxisTraffic(axis, op, *sizes) for op, axis, *sizes in self.calls)

    @property
    def held(self) -> int:
        """Bytes at the fullest moment."""
        return sum(self.parts.values())


@lru_cache(maxsize=256)
def dry_run(
    plan: Plan, config, rows: int, length: int, itemsize: int = 4, optimizer: str = "adamw", rank: int = 0
) -> DryRank:
    """What a rank sends and holds in a step, the first one apart; without a flush in a stream that fills the pipeline.

    The plan must fit the model, as `Plan.check` says. Raises RuntimeError inside a rank.
    """
    if itemsize not in DTYPES:
        raise ValueError(f"No step is run with numbers of {itemsize} bytes. Use 2, 4 or 8.")
    with _one_rank(rank, plan.world, _evenly(config, length)) as seen:
        mesh = Mesh(**plan.axes)
        trainer = Trainer(build(plan, config, mesh, DTYPES[itemsize]), Recipe(optimizer))
        parallel, batch = trainer.parallel, _batch(rows, length)
        seen.know(parallel.model)
        _make_state(trainer, batch)
        seen.call([*(p.data for p in parallel.model.parameters()), *parallel.sync.weight_memory()], "weights")
        seen.call([t for s in trainer.optimizer.state.values() for t in s.values()], "optimizer")
        comm.clear_log()
        seen.forget()
        trainer.stream([batch] * steps_until_full(plan))
        seen.settle()
        calls = tuple((e.op, e.axis, e.bytes, e.messages) for e in comm.log)
        parts = {part: seen.parts.get(part, 0) for part in PARTS}
        found = DryRank(mesh.coordinates(), calls, parts, seen.moment)
        del trainer, parallel
    return found


def steps_until_full(plan: Plan) -> int:
    """Steps after which a rank has as many versions of its weights as it ever will; 1 with a flush."""
    return 2 + -(-2 * plan.pp // plan.micro) if plan.asynchronous else 1


def _batch(rows: int, length: int) -> Batch:
    tokens = torch.zeros(rows, length, dtype=torch.long)
    return Batch(tokens, tokens.clone(), torch.arange(length), torch.arange(rows), rows * length)


def _make_state(trainer: Trainer, batch: Batch) -> None:
    """The optimizer's state, which a first step makes."""
    if trainer.parallel.plan.asynchronous:  # an end of its pipeline has none of the other end's embedding
        trainer.step(batch)
    else:
        for piece in trainer.parallel.sync.pieces:
            piece.tensor.grad = torch.zeros_like(piece.tensor)
        trainer.optimizer.step()
    trainer.optimizer.zero_grad()


@contextmanager
def _one_rank(rank: int, world: int, by_expert):
    """Inside, this process is one rank, its tensors have no numbers, and tokens go to experts as `by_expert` says."""
    with ExitStack() as stack:
        stack.callback(comm.log.extend, list(comm.log))
        stack.callback(comm.clear_log)
        stack.enter_context(one_of(rank, world))
        stack.enter_context(patch.object(mixture, "by_expert", by_expert))
        yield stack.enter_context(numberless())


def _evenly(config, length: int):
    """`by_expert` as if every expert got equally many of the choices that find room."""

    def by_expert(choices: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = round(rows_of(config, length, choices.numel() // choices.size(-1)))
        return torch.arange(rows), torch.tensor(split_sizes(rows, count))

    return by_expert


UNBOUNDED = "gpipe", "breadth_first", "terapipe"  # these keep all micro-batches
UNEVEN = "owner", "server", "servers"  # with these replicas hold different things


@checked(rows=1, length=1)
def fullest_ranks(
    plan: Plan, config, rows: int, length: int, itemsize: int = 4, optimizer: str = "adamw"
) -> Iterator[DryRank]:
    """The rank of each pipeline stage that holds most in a step, one stage after the other.

    Of ranks that are alike the first is run: it has the most rows, and the largest part of what is cut unevenly.
    """
    plan.check(config, rows, length)
    plan, rows = _shorter(plan, rows)
    replicas = range(plan.dp if plan.data in UNEVEN else 1)
    for stage in patiently(range(plan.pp), "stages"):
        first = stage * plan.dp * plan.cp * plan.tp
        beside = [first + (dp * plan.cp + cp) * plan.tp for dp in replicas for cp in range(plan.cp)]
        runs = [dry_run(plan, config, rows, length, itemsize, optimizer, rank) for rank in beside]
        yield max(runs, key=lambda run: run.held)


def _shorter(plan: Plan, rows: int) -> tuple[Plan, int]:
    """A plan of as many micro-batches, of the same sizes, as fill its pipeline and one more; its rows."""
    micro = min(plan.micro, 2 * plan.pp + 1)
    if plan.asynchronous or plan.pp > 1 and plan.schedule in UNBOUNDED:
        return plan, rows
    mine = split_sizes(split_sizes(rows, plan.dp)[0], plan.micro)[:micro]
    return replace(plan, micro=micro), rows if micro == plan.micro else sum(mine) * plan.dp
