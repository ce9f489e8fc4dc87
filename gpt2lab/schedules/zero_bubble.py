"""Zero-bubble schedules: no other rank needs a weight gradient, so weight gradients fill the gaps (Qi et al. 2023)."""

from .phases import play, v_placement
from .schedule import Op, Schedule


def zb_h1(ranks: int, micros: int) -> Schedule:
    """1F1B whose weight gradients are put off until memory runs out, at 1F1B's peak memory (Qi et al. 2023).

    Bubble (p - 1)(TF + TI - TW) in each rank's own span; every rank holds at most p activations. On rank r, r of them
    are between I and W, where only x and dy of the linear layers are kept.
    """
    return _handcrafted(ranks, micros, "zb_h1", limit=ranks, lead=1)


def zb_h2(ranks: int, micros: int) -> Schedule:
    """Twice the warm-up of ZB-H1: the schedule's two triangles become one parallelogram (Qi et al. 2023).

    Bubble (p - 1)(TF + TI - 2 TW) in each rank's own span, zero where TF = TI = TW; at most 2p - 1 activations.
    """
    return _handcrafted(ranks, micros, "zb_h2", limit=2 * ranks - 1, lead=2)


def zb_v(ranks: int, micros: int) -> Schedule:
    """Two chunks per rank along a V: the first and the last stage share a rank (Qi et al. 2023, section 6).

    No bubble in a rank's own span where TF = TI = TW, at 1F1B's memory: 2p activations of half-size stages.
    """
    work = max(micros, 2 * ranks)
    orders = []
    for r in range(ranks):
        phases = [
            ("Fa", 2 * (ranks - r) - 1),  # fill the pipeline
            ("Fb Fa", r),
            ("Fb Ib Wb", ranks - r),  # the first gradients have arrived
            ("Fa Ia Wa Fb Ib Wb", work - ranks),  # steady; Fa is the first without a micro-batch, and skipped
            ("Ia Ib", r),
            ("Ia Wa", ranks - r),
            ("W", 2 * r),
        ]
        orders.append(play(phases, {"a": r, "b": 2 * ranks - 1 - r}, range(work), range(work)))
    promise = (min(2 * micros, 2 * ranks),) * ranks
    return Schedule(tuple(orders), v_placement(ranks), work, name="zb_v", promise=promise).without(micros)


def _handcrafted(ranks, micros, name, limit, lead) -> Schedule:
    """Forwards lead by `lead` per stage; from `limit` activations on, a weight gradient follows each input gradient."""
    orders = []
    for s in range(ranks):
        warm_up = min(micros, lead * (ranks - 1 - s))
        order = [Op("F", s, i) for i in range(warm_up)]
        forwards, weights = warm_up, 0
        for i in range(micros):
            if forwards < micros:
                order.append(Op("F", s, forwards))
                forwards += 1
            order.append(Op("I", s, i))
            if forwards - weights == min(limit, micros) or forwards == micros and i + 1 > micros - warm_up:
                order.append(Op("W", s, weights))
                weights += 1
        orders.append(tuple(order + [Op("W", s, i) for i in range(weights, micros)]))
    promise = (min(micros, limit),) * ranks
    return Schedule(tuple(orders), tuple(range(ranks)), micros, name=name, promise=promise)
