"""What operations take, and when each one of a schedule runs: exact with integers and Fractions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ..machine.arguments import checked
from .schedule import Op, Schedule


@checked(forward=0, input_grad=0, weight_grad=0, backward=0, hop=0, factors=0, joint=0, position=0, unit=0)
@dataclass(frozen=True)
class Cost:
    """How long operations take: one number for all stages, or one for each position in the model.

    `backward` is the whole backward; None means input_grad + weight_grad. `hop` is the latency between two ranks; with
    `blocking` the sender waits for it too. The times of micro-batch (or slice) i are multiplied by factors[i % len].
    `joint` is DualPipe's F&B: a forward and the backward of another stage right after it run as one block that starts
    when both can and ends together; None runs them one after the other. With `recompute` stages keep only their
    inputs: a backward (B or I) runs the forward again first.
    """

    forward: float | Sequence[float] = 1
    input_grad: float | Sequence[float] = 1
    weight_grad: float | Sequence[float] = 1
    backward: float | Sequence[float] | None = None
    hop: float = 0
    blocking: bool = False
    factors: Sequence[float] = (1,)
    joint: float | None = None
    recompute: bool = False

    def time(self, kind: str, position: int, unit: int):
        """The time of one operation."""
        if kind == "B" and self.backward is None:
            return self.time("I", position, unit) + self.time("W", position, unit)
        number = {"F": self.forward, "B": self.backward, "I": self.input_grad, "W": self.weight_grad}[kind]
        value = number[position] if isinstance(number, Sequence) else number
        again = self.time("F", position, unit) if self.recompute and kind in "BI" else 0
        return value * self.factors[unit % len(self.factors)] + again


@dataclass(frozen=True)
class TimedOp:
    """An operation with its start and end."""

    op: Op
    start: object
    end: object


@checked(rank=0)
@dataclass(frozen=True)
class Timeline:
    """When every rank runs its operations, and the numbers that follow from it."""

    schedule: Schedule
    rows: tuple[tuple[TimedOp, ...], ...]
    cost: Cost = field(default_factory=Cost)

    @property
    def makespan(self):
        """The time from the first start to the last end."""
        return max((row[-1].end for row in self.rows if row), default=0)

    def busy(self, rank: int):
        """Time that the rank works."""
        return sum(box.end - box.start for box in self.rows[rank])

    def span(self, rank: int):
        """The time from the rank's own first start to its own last end."""
        row = self.rows[rank]
        return row[-1].end - row[0].start if row else 0

    @property
    def bubble(self):
        """Idle share of all ranks' time until the makespan: what most papers call the bubble ratio."""
        whole = len(self.rows) * self.makespan
        return exact_ratio(whole - sum(map(self.busy, range(len(self.rows)))), whole)

    @property
    def span_bubble(self):
        """The worst idle share of a rank's own span: the zero-bubble papers' bubble rate, as steps can overlap."""
        return max(exact_ratio(self.span(r) - self.busy(r), self.span(r)) for r in range(len(self.rows)))

    @property
    def bubble_over_ideal(self):
        """Makespan without the ideal time, over the ideal time (Narayanan et al. 2021)."""
        ideal = max(map(self.busy, range(len(self.rows))))
        return exact_ratio(self.makespan - ideal, ideal)

    def memory(self, rank: int) -> list[tuple]:
        """Pairs (time, activations held from then on), in units of one p-th of the model for one micro-batch."""
        one = Fraction(self.schedule.ranks, self.schedule.depth * self.schedule.slices)
        held, steps = 0, [(0, Fraction(0))]
        for box in self.rows[rank]:
            if box.op.kind == "F":
                held += 1
                steps.append((box.start, held * one))
            elif box.op.kind in "BW":
                held -= 1
                steps.append((box.end, held * one))
        return steps


def exact_ratio(part, whole):
    """part / whole: a Fraction, unless one of them is a float; 0 of nothing."""
    if not whole:
        return Fraction(0)
    return part / whole if isinstance(part, float) or isinstance(whole, float) else Fraction(part) / whole
