"""Pipeline schedules as data: generated, checked, simulated, drawn; plain Python without torch.

schedule = make("1f1b", ranks=4, micros=8)
check(schedule)
print(draw(simulate(schedule, Cost(forward=1, input_grad=1, weight_grad=1))))
"""

from .play import ScheduleError, check, simulate
from .registry import NAMES, make
from .schedule import Op, Schedule
from .terapipe import best_slices
from .text import draw, from_csv, summary, to_csv
from .timeline import Cost, Timeline

__all__ = [
    "NAMES",
    "Cost",
    "Op",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "best_slices",
    "check",
    "draw",
    "from_csv",
    "make",
    "simulate",
    "summary",
    "to_csv",
]
