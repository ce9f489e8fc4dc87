"""A pipeline schedule is data: for every rank, the list of operations that it runs, in order.

An operation is written as PyTorch writes it: `2F0` is the forward of micro-batch 0 through stage 2, `2B0` its whole
backward, `2I0` only the gradient of the stage's input, `2W0` only the gradients of its weights (B = I then W).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ..machine.arguments import checked

MOST = 10_000_000  # operations of a schedule: more take minutes to lay out
KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Op(NamedTuple):
    """One operation: its kind (F, B, I or W), the stage it runs and the micro-batch it works on."""

    kind: str
    stage: int
    micro: int

    def __str__(self):
        return f"{self.stage}{self.kind}{self.micro}"


@checked(placement=0, micros=1, copies=1, slices=1, stage=lambda s: len(s.placement) - 1, rank=lambda s: s.ranks - 1,
         micro=lambda s: s.units - 1, keep=lambda s: s.micros)  # fmt: skip
@dataclass(frozen=True)
class Schedule:
    """What each rank runs, in which order.

    `placement[stage]` is the rank of a stage. With `copies` = 2 there are two copies of the model: stages 0..n-1 are
    the first, stages n..2n-1 the second, and micro-batch i uses copy i % 2. With `slices` = K a micro-batch is cut
    into K token slices, and unit u means slice u % K of micro-batch u // K. `promise[rank]` is the most stage
    activations that the schedule holds on a rank. With `replicas` a stage is on that many ranks, its placement and the
    following ones, which take the micro-batches in turn.
    """

    orders: tuple[tuple[Op, ...], ...]
    placement: tuple[int, ...]
    micros: int
    copies: int = 1
    slices: int = 1
    name: str = field(default="", compare=False)
    promise: tuple[int, ...] = field(default=(), compare=False)
    replicas: tuple[int, ...] = ()

    def __post_init__(self):
        if len(self.placement) % self.copies:
            raise ValueError(f"{len(self.placement)} stages make no {self.copies} copies. Use a divisor.")

    @property
    def ranks(self) -> int:
        """How many ranks the pipeline has."""
        return len(self.orders)

    @property
    def depth(self) -> int:
        """How many stages one micro-batch passes."""
        return len(self.placement) // self.copies

    @property
    def units(self) -> int:
        """How many units of work pass each stage: micro-batches times token slices."""
        return self.micros * self.slices

    @cached_property
    def splits(self) -> bool:
        """Whether some backward is split into input gradient and weight gradient."""
        return any(op.kind == "W" for order in self.orders for op in order)

    def position(self, stage: int) -> int:
        """Which part of the model a stage holds: 0 has the embedding, depth - 1 the head."""
        return stage % self.depth

    def stages_of(self, rank: int) -> list[int]:
        """The stages on a rank."""
        many = self.replicas or (1,) * len(self.placement)
        return [s for s, first in enumerate(self.placement) if first <= rank < first + many[s]]

    def ranks_of(self, stage: int) -> range:
        """The ranks that hold a stage: one, or its replicas."""
        first = self.placement[stage]
        return range(first, first + (self.replicas[stage] if self.replicas else 1))

    def rank_of(self, op: Op) -> int:
        """The rank that runs an operation."""
        first = self.placement[op.stage]
        return first + op.micro % self.replicas[op.stage] if self.replicas else first

    def route(self, micro: int) -> range:
        """The stages that a unit of work passes, in order."""
        start = micro // self.slices % self.copies * self.depth
        return range(start, start + self.depth)

    def needs(self, op: Op) -> Iterable[Op]:
        """The operations that must be done before `op`; a backward is called I here, also if it is whole (B)."""
        kind, stage, micro = op
        if kind == "W":
            yield Op("I", stage, micro)
        elif kind == "F":
            if stage % self.depth:
                yield Op("F", stage - 1, micro)
            if micro % self.slices:
                yield Op("F", stage, micro - 1)  # attention reads the earlier slices of the same rows
        else:
            yield Op("F", stage, micro)
            if (stage + 1) % self.depth:
                yield Op("I", stage + 1, micro)
            if (micro + 1) % self.slices:
                yield Op("I", stage, micro + 1)  # so the later slices give gradients to this one

    def message(self, op: Op) -> Op | None:
        """The operation on another rank that waits for the result of `op`, if there is one."""
        kind, stage, micro = op
        if kind == "F" and (stage + 1) % self.depth:
            there = Op("F", stage + 1, micro)
        elif kind in "BI" and stage % self.depth:
            there = Op("I", stage - 1, micro)
        else:
            return None
        return None if self.rank_of(there) == self.rank_of(op) else there

    @cached_property
    def incoming(self) -> list[dict[int, list[Op]]]:
        """incoming[rank][sender]: the operations whose inputs come from that sender, in the order of sending."""
        found: list[dict[int, list[Op]]] = [{} for _ in self.orders]
        for sender, order in enumerate(self.orders):
            for there in filter(None, map(self.message, order)):
                found[self.rank_of(there)].setdefault(sender, []).append(there)
        return found

    @cached_property
    def forward_only(self) -> "Schedule":
        """The same without backwards: what evaluation runs."""
        orders = tuple(tuple(op for op in order if op.kind == "F") for order in self.orders)
        return replace(self, orders=orders, promise=())

    def held(self, rank: int) -> list[int]:
        """How many stage activations the rank holds after each operation: F adds one, B or W frees one."""
        return list(accumulate((op.kind == "F") - (op.kind in "BW") for op in self.orders[rank]))

    def waiting(self, rank: int) -> list[int]:
        """How many of those held need only their weight gradient, and less memory: I adds one, W frees one."""
        return list(accumulate((op.kind == "I") - (op.kind == "W") for op in self.orders[rank]))

    def peak(self, rank: int) -> int:
        """The most stage activations that the rank holds at any time."""
        return max(self.held(rank), default=0)

    def activations(self, rank: int) -> Fraction:
        """The peak in units of one p-th of the model's activations for one micro-batch (Ma in the papers)."""
        return Fraction(self.peak(rank) * self.ranks, self.depth * self.slices)

    def weights(self, rank: int) -> Fraction:
        """Weights on a rank in units of one p-th of the model (M in the papers)."""
        return Fraction(len(self.stages_of(rank)) * self.ranks, self.depth)

    def messages(self, rank: int) -> int:
        """How many activations and gradients the rank sends to other ranks."""
        return sum(self.message(op) is not None for op in self.orders[rank])

    def without(self, keep: int) -> "Schedule":
        """The same schedule with only the first `keep` micro-batches.

        Micro-batches do not depend on each other, so the order stays right without some of them.
        """
        if keep == self.micros:
            return self
        orders = tuple(tuple(op for op in order if op.micro < keep * self.slices) for order in self.orders)
        return replace(self, orders=orders, micros=keep)


def require(ranks: int, micros: int, **others: int) -> None:
    """Raise ValueError for a size below one."""
    for name, value in {"stages": ranks, "micro-batches": micros, **others}.items():
        if not isinstance(value, int):
            raise ValueError(f"{name} = {str(value)[:80]!r} is no whole number. Use {name} = 1 or more.")
        if value < 1:
            raise ValueError(f"{name} = {value}: a pipeline needs at least 1. Use {name} = 1 or more.")
    if ranks * micros * math.prod(others.values()) > MOST:
        raise ValueError(
            f"{ranks:,} stages and {micros:,} micro-batches make too many operations. Use fewer."
        )
