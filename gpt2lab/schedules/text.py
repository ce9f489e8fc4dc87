"""Schedules as text: drawn in a terminal, and as CSV in PyTorch's notation, a line for every rank."""

import math
import re
from fractions import Fraction

from ..machine.arguments import checked
from .play import ScheduleError, simulate
from .schedule import Op, Schedule
from .timeline import Timeline

_OP = re.compile(r"(\d+)([FBIW])(\d+)$")
_SAID = re.compile(  # the comment that `to_csv` writes
    r"# micros=(?P<micros>\d+),copies=(?P<copies>\d+),slices=(?P<slices>\d+),placement=(?P<placement>\d+( \d+)*)$"
)


@checked(width=1)
def draw(timeline: Timeline | Schedule, width: int = 160) -> str:
    """The timeline as text: a row for each rank, a column for each unit of time, dots where the rank is idle.

    With several stages a rank every operation shows its stage. One that takes less than half a column is not shown;
    rows longer than `width` end in "...".
    """
    if isinstance(timeline, Schedule):
        timeline = simulate(timeline)
    schedule = timeline.schedule
    many = len(schedule.placement) > schedule.ranks
    unit = _unit(timeline)
    names = {op: str(op) if many else f"{op.kind}{op.micro}" for order in schedule.orders for op in order}
    cell = max(map(len, names.values())) + 1
    lines = []
    for rank, row in enumerate(timeline.rows):
        cells = ["." * (cell - 1)] * _slots(timeline.makespan, unit)
        for box in row:
            first, last = _slots(box.start, unit), _slots(box.end, unit)
            if first < last:
                cells[first:last] = [names[box.op]] + ["-" * (cell - 1)] * (last - first - 1)
        text = " ".join(c.ljust(cell - 1) for c in cells)
        head, tail = f"rank {rank:<2} | ", f" | holds {schedule.peak(rank)}"
        room = width - len(head) - len(tail)
        lines.append(
            head + (text if len(text) <= room else text[: max(0, room - 4)].rstrip() + " ...") + tail
        )
    return "\n".join(lines)


@checked()
def summary(timeline: Timeline) -> str:
    """The numbers under the drawing: time, bubble in all three definitions, activations, weights, messages."""
    schedule = timeline.schedule
    ranks = range(schedule.ranks)
    activations = ", ".join(_short(schedule.activations(r)) for r in ranks)
    lines = [
        f"makespan      {_short(timeline.makespan)}",
        f"bubble        {_percent(timeline.bubble)} of the makespan, {_percent(timeline.span_bubble)} of the "
        f"worst own span, {_percent(timeline.bubble_over_ideal)} over the ideal time",
        f"activations   {activations}   (peak of each rank, in p-ths of the model for one micro-batch)",
        f"weights       {_short(max(schedule.weights(r) for r in ranks))} p-ths of the model a rank",
        f"messages      {sum(schedule.messages(r) for r in ranks)} between ranks",
    ]
    return "\n".join(lines)


@checked()
def to_csv(schedule: Schedule) -> str:
    """A line for every rank, its operations separated by commas: `0F0,0F1,0B0`.

    A comment above them says what the operations do not show: two copies of the model, token slices. Raises
    ScheduleError for stages on several ranks.
    """
    if schedule.replicas:
        raise ScheduleError("A stage on several ranks cannot be written. Use a schedule of one rank a stage.")
    where = " ".join(map(str, schedule.placement))
    head = f"# micros={schedule.micros},copies={schedule.copies},slices={schedule.slices},placement={where}\n"
    rows = "".join(",".join(map(str, order)) + "\n" for order in schedule.orders)
    return rows if schedule.copies == schedule.slices == 1 else head + rows


@checked(slices=1)
def from_csv(text: str, slices: int | None = None) -> Schedule:
    """Read what `to_csv` or PyTorch's pipelining wrote.

    Empty cells are idle slots, an empty line is an idle rank, and PyTorch's joint blocks become two operations.
    Without the comment of `to_csv` the placement and the number of micro-batches follow from the operations, and the
    model has one copy. Raises ScheduleError for anything that is not an operation.
    """
    lines = text.rstrip().splitlines()
    comment = lines.pop(0) if lines and lines[0].startswith("#") else ""
    said = found.groupdict() if (found := _SAID.match(comment.rstrip())) else {}
    orders = tuple(tuple(op for cell in row.split(",") for op in _parse(cell)) for row in lines)
    slices = _agreed(slices, said.get("slices"))
    if "placement" in said:
        where = tuple(map(int, said["placement"].split()))
        return Schedule(orders, where, int(said["micros"]), int(said["copies"]), slices)
    units = 1 + max((op.micro for order in orders for op in order), default=0)
    return Schedule(orders, _placement(orders), -(-units // slices), 1, slices)


def _agreed(asked: int | None, said: str | None) -> int:
    """The number of token slices: the argument, or the comment's, or 1."""
    if asked is not None and said is not None and asked != int(said):
        raise ScheduleError(
            f"This schedule says slices={said}, but slices={asked} was asked for. Leave it out."
        )
    return asked or int(said or 1)


def _placement(orders) -> tuple[int, ...]:
    """The rank of every stage, as the operations show it."""
    where = {op.stage: rank for rank, order in enumerate(orders) for op in order}
    if not where:
        raise ScheduleError("There is no operation in this text. Write for example 0F0,0B0.")
    missing = next((stage for stage in range(len(where)) if stage not in where), None)
    if missing is not None:
        raise ScheduleError(f"Stage {missing} of {max(where) + 1} has no operation. Number stages from 0.")
    return tuple(where[stage] for stage in sorted(where))


def _parse(cell: str) -> list[Op]:
    cell = cell.strip().strip('"')
    if not cell:
        return []
    ops = []
    for part in cell.removesuffix("OVERLAP_F_B").strip("()").split(";"):
        found = _OP.match(part.strip())
        if not found:
            raise ScheduleError(
                f"{cell!r} is not an operation. Write stage, kind and micro-batch, such as 0F0, 2I1, 2W1."
            )
        ops.append(Op(found[2], int(found[1]), int(found[3])))
    return ops


def _unit(timeline: Timeline) -> Fraction:
    """The largest time that all starts and ends are multiples of; floats are drawn in 60 columns; 1 if all are 0."""
    ends = [t for row in timeline.rows for box in row for t in (box.start, box.end)]
    if any(isinstance(t, float) for t in ends):
        return Fraction(timeline.makespan) / 60 or Fraction(1)
    ends = [Fraction(t) for t in ends if t]
    whole = math.lcm(*(t.denominator for t in ends))
    return Fraction(math.gcd(*(int(t * whole) for t in ends)) or 1, whole)


def _slots(time, unit) -> int:
    return round(Fraction(time) / unit)


def _short(number) -> str:
    return f"{float(number):.4g}"


def _percent(number) -> str:
    return f"{100 * float(number):.1f} %"
