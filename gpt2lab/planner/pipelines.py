"""How long a pipeline takes from its first forward to its last backward: by its clock, or faster where that is exact.

The clock visits every operation. For 1F1B all stages take a step at once; of any other long schedule only the beginning
is simulated, as each further micro-batch adds the same time once the pipeline is full; of `WHOLE` it does not.
"""

from functools import lru_cache

import numpy as np

from ..schedules import Cost, simulate
from .share import order_of

MOST = 2_000  # operations that are simulated one by one
WHOLE = "zb_h2", "dualpipe_v"


@lru_cache(maxsize=4096)
def pipeline_seconds(plan, forward: tuple, first: tuple, second: tuple, hop: float, factors: tuple) -> float:
    """Seconds of the plan's schedule: `forward`, input and weight gradient by position, and of a message.

    `factors` are the shares of a full unit that each unit of work has; uneven units are always simulated one by one.
    """
    even = len(set(factors)) == 1
    if plan.schedule == "1f1b" and even:
        return time_of_1f1b(forward, [a + b for a, b in zip(first, second, strict=True)], hop, plan.micro)
    cost = Cost(list(forward), list(first), list(second), hop=hop, factors=factors if not even else (1,))
    whole = lambda micro: float(simulate(order_of(plan, micro), cost).makespan)
    chunks = len(forward) // plan.pp or 1
    few, more = 3 * plan.pp, 4 * plan.pp
    if not even or plan.schedule in WHOLE or 2 * plan.pp * chunks * plan.micro <= MOST or plan.micro <= more:
        return whole(plan.micro)
    few += (plan.micro - few) % plan.pp  # the same remainder: schedules go by groups of pp micro-batches
    a, b = whole(few), whole(few + 2 * plan.pp)
    return a + (plan.micro - few) * (b - a) / (2 * plan.pp)


def time_of_1f1b(forward, backward, hop: float, micro: int) -> float:
    """The makespan of 1F1B by the slots of its order: F of micro-batch i on stage s in slot s + i, later s + 2 i.

    B is in slot 2 p - 1 - s + 2 i. Every result is there before the slot that needs it, so a slot is one array.
    """
    p = len(forward)
    stage, costs = np.arange(p), np.array([forward, backward])
    ready = np.zeros((2, p + 2, micro))  # when results of F and B are there; a row of zeros at both ends
    free, warm = np.zeros(p), p - 1 - stage
    for slot in range(2 * (micro + p)):
        early, late, back = slot - stage, (slot - stage) // 2, (slot - 2 * p + 1 + stage) // 2
        steady = ((slot - stage) % 2 == 0) & (late > warm)
        ahead = np.where((early >= 0) & (early <= warm), early, np.where(steady, late, -1))
        behind = np.where((slot - 2 * p + 1 + stage) % 2 == 0, back, -1)
        for kind, units in ((0, ahead), (1, behind)):
            s = np.flatnonzero((units >= 0) & (units < micro))
            i, other = units[s], s + (0 if kind == 0 else 2)
            arrived = ready[kind, other, i] + hop * ((other > 0) & (other <= p))
            free[s] = np.maximum(free[s], arrived) + costs[kind, s]
            ready[kind, s + 1, i] = free[s]
    return float(free.max())
