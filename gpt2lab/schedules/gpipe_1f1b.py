"""Schedules with one stage a rank and whole backwards: naive, GPipe, 1F1B."""

from .schedule import Op, Schedule, require


def naive(ranks: int, micros: int) -> Schedule:
    """One micro-batch at a time through the whole model: all ranks but one are idle.

    Bubble (p - 1) / p of the makespan; one activation held.
    """
    require(ranks, micros)
    orders = [[Op(kind, s, i) for i in range(micros) for kind in "FB"] for s in range(ranks)]
    return _one_stage_each(orders, micros, "naive", [1] * ranks)


def gpipe(ranks: int, micros: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe").

    Bubble (p - 1) / (m + p - 1) of the makespan; every rank holds all m activations. Backwards run in the order of the
    forwards, so that gradients are added in the same order as in 1F1B.
    """
    require(ranks, micros)
    orders = [[Op(kind, s, i) for kind in "FB" for i in range(micros)] for s in range(ranks)]
    return _one_stage_each(orders, micros, "gpipe", [micros] * ranks)


def one_forward_one_backward(ranks: int, micros: int) -> Schedule:
    """p - 1 - s forwards to warm up, then one forward, one backward (Narayanan et al. 2019; Fan et al. 2021).

    Bubble (p - 1) / (m + p - 1), the same as GPipe's; but stage s holds only min(m, p - s) activations.
    """
    return alternate(ranks, micros, ranks, "1f1b")


def alternate(ranks: int, micros: int, active: int, name: str) -> Schedule:
    """1F1B's order with at most `active` micro-batches in flight: fewer than p hold less, and wait."""
    require(ranks, micros)
    orders = []
    for s in range(ranks):
        warm_up = min(micros, ranks - 1 - s, active - 1)
        order = [Op("F", s, i) for i in range(warm_up)]
        for i in range(micros - warm_up):
            order += [Op("F", s, warm_up + i), Op("B", s, i)]
        orders.append(order + [Op("B", s, i) for i in range(micros - warm_up, micros)])
    return _one_stage_each(orders, micros, name, [min(micros, ranks - s, active) for s in range(ranks)])


def _one_stage_each(orders, micros, name, promise) -> Schedule:
    ranks = tuple(range(len(orders)))
    return Schedule(tuple(map(tuple, orders)), ranks, micros, name=name, promise=tuple(promise))
