"""What each rank of a plan holds when it holds most: weights, gradients, optimizer, activations, logits, buffers.

A search asks for thousands of plans, so for what it proposes there are formulas: a step is walked through, operation by
operation, and every moment at which memory can be highest is noted: the loss, the first backward, the sums that end the
step. All other plans are run dry. All numbers are bytes, computed; the tests compare them with what the allocator of
live ranks counted. What torch itself keeps is not in it, nor are messages under way in a step.

Activations: Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4. ZeRO: Rajbhandari et al. 2020.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property

from ..machine.arguments import checked
from ..schedules import Op
from .dry import UNBOUNDED, UNEVEN, dry_run
from .models import Transformer
from .moments import Walk
from .share import RankShare, check, order_of, why_no_price

MOMENTS = {"adamw": 2, "sgd": 0}


@dataclass(frozen=True)
class Held:
    """Bytes that one rank of a pipeline's stage (`stage`: its place in the pipeline) holds at its fullest moment."""

    stage: int
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what they are for."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "stage"}

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
    return tuple(
        max((of_rank(one, optimizer) for one in _beside(share)), key=lambda h: h.total) for share in shares
    )


def _beside(share: RankShare) -> list[RankShare]:
    """The context rank with the most tokens, and where ranks borrow unequally the last one, which borrows most.

    Replicas that hold different things are all looked at.
    """
    if share.plan.data in UNEVEN:
        return [replace(share, dp=dp, cp=cp) for dp in range(share.plan.dp) for cp in range(share.plan.cp)]
    sizes, name = share.table.sizes if share.table else [0], share.plan.exchange
    unequal = len(sizes) - 1 if name == "triangle" or name.startswith("halo") else 0
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
        return Held(share.pp, **dry_run(share.plan, share.config, *sizes, optimizer, share.number).parts)
    walk = Walk(share, MOMENTS[optimizer])
    for op in _order(share):
        walk.forward(op) if op.kind == "F" else walk.backward(op)
    walk.finish()
    return Held(share.pp, **walk.fullest)


def has_formula(plan, config) -> bool:
    """Whether memory is known by formula: of dense models and simple mixtures, where all replicas hold alike."""
    return plan.data not in UNEVEN and plan.schedule != "terapipe" and not why_no_price(plan, config)


def _order(share: RankShare) -> list[Op]:
    """The operations of the rank, of a pipeline of as many micro-batches as fill it where that is enough."""
    plan = share.plan
    bounded = plan.schedule not in UNBOUNDED or plan.pp == 1
    # of a single stage the second one on, where sums are under way the third, are alike or have fewer rows
    enough = min(plan.micro, 2 * plan.pp + (plan.pp == 1 and plan.zero > 1)) if bounded else plan.micro
    return order_of(plan, enough).orders[share.pp]
