"""Schedules with one stage a rank and whole backwards: naive, GPipe, 1F1B."""

from itertools import accumulate

from .schedule import Op, Schedule


def naive(ranks: int, micros: int) -> Schedule:
    """One micro-batch at a time through the whole model: all ranks but one are idle.

    Bubble (p - 1) / p of the makespan; one activation held.
    """
    orders = [[Op(kind, s, i) for i in range(micros) for kind in "FB"] for s in range(ranks)]
    return _one_stage_each(orders, micros, "naive", [1] * ranks)


def gpipe(ranks: int, micros: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe").

    Bubble (p - 1) / (m + p - 1) of the makespan; every rank holds all m activations. Backwards run in the order of the
    forwards, so that gradients are added in the same order as in 1F1B.
    """
    orders = [[Op(kind, s, i) for kind in "FB" for i in range(micros)] for s in range(ranks)]
    return _one_stage_each(orders, micros, "gpipe", [micros] * ranks)


def one_forward_one_backward(ranks: int, micros: int) -> Schedule:
    """p - 1 - s forwards to warm up, then one forward, one backward (Narayanan et al. 2019; Fan et al. 2021).

    Bubble (p - 1) / (m + p - 1), the same as GPipe's; but stage s holds only min(m, p - s) activations.
    """
    return alternate((1,) * ranks, micros, ranks, "1f1b")


def alternate(replicas: tuple[int, ...], micros: int, active: int, name: str) -> Schedule:
    """1F1B's order; `replicas[s]` ranks share stage s and take the micro-batches in turn.

    A rank has as many micro-batches in flight as there are ranks from its stage on for each replica of the stage,
    rounded up, and at most `active`: fewer hold less, and wait.
    """
    orders, promise = [], []
    for s, count in enumerate(replicas):
        most = min(active, -(-sum(replicas[s:]) // count))
        for replica in range(count):
            mine = range(replica, micros, count)
            order = [Op("F", s, i) for i in mine[: most - 1]]
            for forward, backward in zip(mine[most - 1 :], mine, strict=False):
                order += [Op("F", s, forward), Op("B", s, backward)]
            orders.append(order + [Op("B", s, i) for i in mine[max(0, len(mine) - most + 1) :]])
            promise.append(min(len(mine), most))
    return _one_stage_each(orders, micros, name, promise, replicas)


def _one_stage_each(orders, micros, name, promise, replicas=()) -> Schedule:
    replicas = () if len(replicas) == len(orders) else replicas
    placement = tuple(accumulate((0, *replicas[:-1]))) if replicas else tuple(range(len(orders)))
    orders, promise = tuple(map(tuple, orders)), tuple(promise)
    return Schedule(orders, placement, micros, name=name, promise=promise, replicas=replicas)
