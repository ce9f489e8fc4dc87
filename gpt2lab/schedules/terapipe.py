"""TeraPipe: a pipeline over slices of one sequence's tokens, which causal attention allows (Li et al. 2021)."""

import math
from collections.abc import Callable, Sequence

from ..machine.arguments import checked
from ..machine.patience import patiently
from .schedule import Op, Schedule, require

MOST = 2048  # places where a slice may end


def terapipe(ranks: int, micros: int, slices: int = 2) -> Schedule:
    """GPipe over token slices: a slice needs keys and values of earlier slices, its gradient those of later ones.

    Forward latency is sum t_i + (p - 1) max t_i over the slices, m times the sum with m micro-batches. Every rank
    holds all m K slices until backward, which runs the slices of a micro-batch from the last to the first.
    """
    units = range(micros * slices)
    back = [i * slices + k for i in range(micros) for k in reversed(range(slices))]
    orders = tuple(
        tuple([Op("F", s, u) for u in units] + [Op("B", s, u) for u in back]) for s in range(ranks)
    )
    promise = (micros * slices,) * ranks
    return Schedule(orders, tuple(range(ranks)), micros, slices=slices, name="terapipe", promise=promise)


@checked(times=0, ranks=1, micros=1)
def latency(times: Sequence[float], ranks: int, micros: int = 1):
    """Time of m micro-batches' forwards whose slices take these times on each stage: m sum t + (p - 1) max t."""
    return micros * sum(times) + (ranks - 1) * max(times)


@checked(tokens=(1, 100_000), ranks=1, micros=1, step=1)
def best_slices(tokens: int, time: Callable, ranks: int, micros: int = 1, step: int = 1) -> list[int]:
    """The slice lengths with the least latency, by TeraPipe's dynamic programme.

    `time(length, context)` is the time of a stage for `length` tokens that attend to `context` earlier ones; lengths
    are multiples of `step`, except the last. For every candidate of the slowest slice, S(i) = min over k of S(i - k) +
    time(k, i - k) among slices no slower; the answer has the least m S(n) + (p - 1) slowest.
    """
    require(ranks, micros, tokens=tokens, step=step)
    ends = [*range(0, tokens, step), tokens]
    if len(ends) > MOST:
        raise ValueError(
            f"{tokens:,} tokens in steps of {step} end at {len(ends):,} places, which is too many pairs. "
            f"Use a step of {-(-tokens // (MOST - 1))} or more."
        )
    table = {(a, b): time(b - a, a) for n, b in enumerate(ends) for a in ends[:n]}
    best = math.inf, []
    for slowest in patiently(sorted(set(table.values())), "candidates for the slowest slice"):
        if (ranks - 1) * slowest >= best[0]:
            break
        if found := _shortest(ends, table, slowest):
            total = micros * found[0] + (ranks - 1) * slowest
            best = min(best, (total, found[1]), key=lambda one: one[0])
    return best[1]


def _shortest(ends, table, slowest):
    """The least sum of slice times with no slice slower than `slowest`, and the lengths; None if impossible."""
    reach = {0: (0, None)}
    for n, b in enumerate(ends[1:], 1):
        options = [(reach[a][0] + table[a, b], a) for a in ends[:n] if a in reach and table[a, b] <= slowest]
        if options:
            reach[b] = min(options)
    if ends[-1] not in reach:
        return None
    lengths, at = [], ends[-1]
    while at:
        lengths.append(at - reach[at][1])
        at = reach[at][1]
    return reach[ends[-1]][0], lengths[::-1]
