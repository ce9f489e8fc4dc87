"""A small language for schedules that come in phases: words such as "Fa Bb" repeated so many times.

A word is a kind (F, B, I or W) and one of the rank's two stages, `a` or `b`. Every word runs the next micro-batch of
its kind and stage; it is a no-op once there is none left. A bare `W` runs the oldest weight gradient that is pending.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from .schedule import Op, require


def play(
    phases: Iterable[tuple[str, int]],
    stages: dict[str, int],
    micros_a: Sequence[int],
    micros_b: Sequence[int],
) -> tuple[Op, ...]:
    """The order of one rank: every phase's words, as many times as it says."""
    forward = {"a": iter(micros_a), "b": iter(micros_b)}
    backward = {"a": iter(micros_a), "b": iter(micros_b)}
    waiting: deque[Op] = deque()
    order: list[Op] = []
    for words, times in phases:
        for word in words.split() * times:
            kind, chunk = word[0], word[1:]
            if kind == "W":
                op = next((w for w in waiting if not chunk or w.stage == stages[chunk]), None)
                if op is not None:
                    waiting.remove(op)
            else:
                micro = next((forward if kind == "F" else backward)[chunk], None)
                op = None if micro is None else Op(kind, stages[chunk], micro)
            if op is None:
                continue
            order.append(op)
            if kind == "I":
                waiting.append(Op("W", op.stage, op.micro))
    return tuple(order)


def v_placement(ranks: int) -> tuple[int, ...]:
    """Stages 0..p-1 down the ranks and stages p..2p-1 back up: rank r holds r and 2p - 1 - r."""
    require(ranks, 1)
    return tuple(range(ranks)) + tuple(reversed(range(ranks)))
