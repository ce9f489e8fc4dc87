"""Schedules as text: drawn in a terminal, and as CSV in PyTorch's notation, a line for every rank."""

import re
from fractions import Fraction
from functools import reduce
from math import gcd

from .check import ScheduleError
from .schedule import Op, Schedule
from .simulate import Timeline, simulate

_OP = re.compile(r"(\d+)([FBIW])(\d+)$")


def draw(timeline: Timeline | Schedule, width: int = 160) -> str:
    """The timeline as text: a row for each rank, a column for each unit of time, dots where the rank is idle.

    With several stages a rank every operation shows its stage; rows longer than `width` end in "...".
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
            cells[first:last] = [names[box.op]] + ["-" * (cell - 1)] * (last - first - 1)
        text = " ".join(c.ljust(cell - 1) for c in cells)
        head, tail = f"rank {rank:<2} | ", f" | holds {schedule.peak(rank)}"
        room = width - len(head) - len(tail)
        lines.append(head + (text if len(text) <= room else text[: room - 4].rstrip() + " ...") + tail)
    return "\n".join(lines)


def summary(timeline: Timeline) -> str:
    """The numbers under the drawing: time, bubble in all three definitions, activations, weights, messages."""
    schedule = timeline.schedule
    ranks = range(schedule.ranks)
    activations = ", ".join(_short(schedule.activations(r)) for r in ranks)
    return "\n".join(
        [
            f"makespan      {_short(timeline.makespan)}",
            f"bubble        {_percent(timeline.bubble)} of the makespan, {_percent(timeline.span_bubble)} of the "
            f"longest own span, {_percent(timeline.bubble_over_ideal)} over the ideal time",
            f"activations   {activations}   (peak of each rank, in p-ths of the model for one micro-batch)",
            f"weights       {_short(max(schedule.weights(r) for r in ranks))} p-ths of the model a rank",
            f"messages      {sum(schedule.messages(r) for r in ranks)} between ranks",
        ]
    )


def to_csv(schedule: Schedule) -> str:
    """A line for every rank, its operations separated by commas: `0F0,0F1,0B0`."""
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.orders)


def from_csv(text: str, slices: int = 1, name: str = "") -> Schedule:
    """Read what `to_csv` or PyTorch's pipelining wrote; empty cells are idle slots, PyTorch's joint blocks
    are opened.

    The placement, the number of micro-batches and whether there are two copies of the model follow from the
    operations. Raises ScheduleError on anything that is not an operation.
    """
    rows = [row for row in text.splitlines() if row.strip(", ")]
    orders = tuple(tuple(op for cell in row.split(",") for op in _parse(cell)) for row in rows)
    where = {op.stage: rank for rank, order in enumerate(orders) for op in order}
    if not where:
        raise ScheduleError("there is no operation in this text. Write for example 0F0,0B0.")
    missing = set(range(max(where) + 1)) - set(where)
    if missing:
        raise ScheduleError(
            f"stage {min(missing)} of {max(where) + 1} has no operation. Number stages from 0."
        )
    units = 1 + max(op.micro for order in orders for op in order)
    first = {op.stage for order in orders for op in order if op.micro == 0}
    copies = 2 if len(first) * 2 == len(where) else 1
    placement = tuple(where[stage] for stage in sorted(where))
    return Schedule(orders, placement, -(-units // slices), copies, slices, name)


def _parse(cell: str) -> list[Op]:
    cell = cell.strip().strip('"')
    if not cell:
        return []
    ops = []
    for part in cell.removesuffix("OVERLAP_F_B").strip("()").split(";"):
        found = _OP.match(part.strip())
        if not found:
            raise ScheduleError(
                f"{cell!r} is no operation. Write stage, kind and micro-batch, such as 0F0, 2I1, 2W1."
            )
        ops.append(Op(found[2], int(found[1]), int(found[3])))
    return ops


def _unit(timeline: Timeline) -> Fraction:
    """The largest time that all starts and ends are multiples of; floats are drawn in 60 columns."""
    ends = [t for row in timeline.rows for box in row for t in (box.start, box.end)]
    if any(isinstance(t, float) for t in ends):
        return Fraction(timeline.makespan) / 60
    ends = [Fraction(t) for t in ends if t]
    whole = reduce(lambda a, b: a * b // gcd(a, b), (t.denominator for t in ends), 1)
    return Fraction(reduce(gcd, (int(t * whole) for t in ends), 0), whole)


def _slots(time, unit) -> int:
    return round(Fraction(time) / unit)


def _short(number) -> str:
    return f"{float(number):.4g}"


def _percent(number) -> str:
    return f"{100 * float(number):.1f} %"
