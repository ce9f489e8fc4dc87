"""What each rank of a plan holds when it holds most: weights, gradients, optimizer, activations, logits, buffers.

A search asks for thousands of plans, so for what it proposes there are formulas: a step is walked through, operation by
operation, and every moment at which memory can be highest is noted: the loss, the first backward, the sums that end the
step. All other plans are run dry. All numbers are bytes, computed; the tests compare them with what the allocator of
live ranks counted. What torch itself keeps is not in it.

Activations: Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4. ZeRO: Rajbhandari et al. 2020.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice

from ..machine.arguments import checked
from ..schedules import Op, Schedule
from .dry import UNBOUNDED, UNEVEN, dry_run
from .models import Transformer
from .moments import Walk
from .numberless import PARTS
from .share import RankShare, check, order_of, why_no_price

MOMENTS = {"adamw": 2, "sgd": 0}


@dataclass(frozen=True)
class Held:
    """Bytes that one rank of a pipeline's stage holds at its fullest moment, by what they are for (`PARTS`).

    `stage` is its place in the pipeline.
    """

    stage: int
    parts: dict[str, int]

    @cached_property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())


@checked(rows=1, length=1, itemsize=1, mixed=0)
def memory(
    plan, config, rows: int, length: int, itemsize: int = 4, optimizer: str = "adamw", mixed: int = 0
) -> tuple[Held, ...]:
    """What the fullest rank of each pipeline stage holds in a step; without a pipeline there is one stage.

    Raises ValueError where the plan cannot run the model, as `Plan.check` says, or for an unknown optimizer.
    """
    check(plan, config, rows, length)
    if optimizer not in MOMENTS:
        raise ValueError(f"There is no optimizer {optimizer!r} here. Use {' or '.join(MOMENTS)}.")
    whole = RankShare(plan, config, rows, length, itemsize, mixed=mixed)
    return fullest([replace(whole, pp=stage) for stage in range(plan.pp)], optimizer)


def fullest(shares: Iterable[RankShare], optimizer: str = "adamw") -> tuple[Held, ...]:
    """What the fullest of the context ranks beside each of these ranks holds."""
    most = lambda share: max((of_rank(one, optimizer) for one in _beside(share)), key=lambda h: h.total)
    return tuple(map(most, shares))


def _beside(share: RankShare) -> list[RankShare]:
    """The context rank with the most tokens, and where ranks borrow unequally the last one, which borrows most.

    Replicas that hold different things are all looked at.
    """
    if share.plan.data in UNEVEN:
        return [replace(share, dp=dp, cp=cp) for dp in range(share.plan.dp) for cp in range(share.plan.cp)]
    sizes, name = share.table.sizes if share.table else [0], share.plan.exchange
    unequal = len(sizes) - 1 if name.startswith(("triangle", "halo", "ring", "double")) else 0
    return [replace(share, cp=place) for place in {sizes.index(max(sizes)), unequal}]


def of_rank(share: RankShare, optimizer: str = "adamw") -> Held:
    """What one rank holds at its fullest moment in a step, the first one apart; without a flush, in a long stream."""
    if not has_formula(share.plan, share.config):
        if share.mixed or isinstance(share.config, Transformer):
            raise ValueError(
                f"{share.plan} has no formula of its memory, by which mixed precision and networks other than GPT-2 "
                "are computed. Use another schedule, or bf16 or float32 of a GPT-2."
            )
        sizes = share.rows, share.length, share.itemsize
        return Held(share.pp, dry_run(share.plan, share.config, *sizes, optimizer, share.number).parts)
    order = _order(share)
    walk = Walk(share, MOMENTS[optimizer], order.placement)
    for op, *beside in _with_messages(order, share):
        walk.travel(*beside)
        walk.forward(op) if op.kind == "F" else walk.backward(op)
    walk.finish()
    most = walk.fullest
    return Held(share.pp, {part: most[part] for part in PARTS})


def has_formula(plan, config) -> bool:
    """Whether memory is known by formula: of dense models and simple mixtures, where all replicas hold alike."""
    return plan.data not in UNEVEN and plan.schedule != "terapipe" and not why_no_price(plan, config)


def _order(share: RankShare) -> Schedule:
    """The schedule of the rank's pipeline of as many micro-batches as fill it where that is enough."""
    plan = share.plan
    bounded = plan.schedule not in UNBOUNDED or plan.pp == 1
    # of a single stage the second one on, where sums are under way the third, are alike or have fewer rows
    enough = min(plan.micro, 2 * plan.pp + (plan.pp == 1 and plan.zero > 1)) if bounded else plan.micro
    return order_of(plan, enough)


def _with_messages(order: Schedule, share: RankShare) -> Iterator[tuple[Op, list[Op], list[Op]]]:
    """A rank's operations, and whose messages it holds beside each: two from each neighbour, the last two that left."""
    coming, sent = list(map(deque, order.incoming[share.pp].values())), defaultdict(lambda: deque(maxlen=2))
    for op in order.orders[share.pp]:
        asked = op._replace(kind="F" if op.kind == "F" else "I")
        for line in coming:
            if asked in line and op.kind != "W":
                line.remove(asked)
        yield op, [one for line in coming for one in islice(line, 2)], [*chain(*sent.values())]
        if there := order.message(op):
            sent[there.kind, op.stage].append(op)
