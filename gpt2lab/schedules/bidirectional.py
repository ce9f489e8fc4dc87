"""Bidirectional schedules: two copies of the model, filled from either end, fill each other's bubbles."""

from collections import deque

from .phases import play, v_placement
from .schedule import Op, Schedule, require
from .sequential import one_forward_one_backward


def chimera(ranks: int, micros: int) -> Schedule:
    """Two 1F1B pipelines in opposite directions, merged slot by slot (Li & Hoefler 2021, "Chimera").

    Even micro-batches travel down the first copy, odd ones up the second, in units of p. Bubble (p - 2) / (2m
    + p - 2) with equal forwards and backwards; 2 weights, p/2 + 1 to p activations. A number of micro-batches
    that does not fill its last unit runs without the surplus, and an odd p has both copies of its middle
    stage on one rank.
    """
    require(ranks, micros)
    per_unit = ranks + ranks % 2
    half, work = per_unit // 2, -(-micros // per_unit) * per_unit
    limits = [min(half, ranks - r) + min(half, r + 1) for r in range(ranks)]
    unit = one_forward_one_backward(ranks, half).orders
    plans = [[_unit(unit, r, u * per_unit) for u in range(work // per_unit)] for r in range(ranks)]
    orders = _merge(plans, limits)
    full = Schedule(orders, v_placement(ranks), work, 2, name="chimera", promise=tuple(limits))
    return full if work == micros else full.without(micros)


def _unit(one_way, rank: int, first: int) -> list[deque[Op]]:
    """What a rank does in one unit: a 1F1B order down the first copy and one up the second."""
    ranks = len(one_way)
    down = deque(Op(kind, s, first + 2 * i) for kind, s, i in one_way[rank])
    up = deque(Op(kind, s + ranks, first + 2 * i + 1) for kind, s, i in one_way[ranks - 1 - rank])
    return [down, up]


def _merge(plans: list[list[list[deque[Op]]]], limits: list[int]) -> tuple[tuple[Op, ...], ...]:
    """Slot by slot, every rank runs what is ready, backwards first, oldest first.

    A rank with nothing ready may begin its next unit, as long as the rest of this one still fits in memory.
    """
    ranks = len(plans)
    plans = [deque(units) for units in plans]
    orders: list[list[Op]] = [[] for _ in plans]
    held = [0] * ranks
    first, last = {0, ranks}, {ranks - 1, 2 * ranks - 1}
    arrived: set[Op] = set()

    def ready(lane):
        return lane and (lane[0] in arrived or lane[0].kind == "F" and lane[0].stage in first)

    while any(plans):
        finished = []
        for r, units in enumerate(plans):
            if not units:
                continue
            lanes = [lane for lane in units[0] if ready(lane)]
            if not lanes and len(units) > 1:
                rest = held[r] + sum(op.kind == "F" for lane in units[0] for op in lane)
                lanes = [lane for lane in units[1] if rest < limits[r] and ready(lane)]
            if lanes:
                lane = min(lanes, key=lambda lane: (lane[0].kind == "F", lane[0].micro))
                op = lane.popleft()
                orders[r].append(op)
                held[r] += 1 if op.kind == "F" else -1
                finished.append(op)
            if not any(units[0]):
                units.popleft()
        for kind, stage, micro in finished:
            if kind == "F":
                arrived.add(Op("B", stage, micro) if stage in last else Op("F", stage + 1, micro))
            elif stage not in first:
                arrived.add(Op("B", stage - 1, micro))
    return tuple(map(tuple, orders))


def dualpipe(ranks: int, micros: int) -> Schedule:
    """Both directions at once, a forward of one always beside a backward of the other (DeepSeek-V3 2024).

    Bubble (p/2 - 1)(F&B + B - 3W), B the whole backward; 2 weights, p + 1 activations. Needs m even and at
    least 2p: fewer or odd numbers run the next good one without the surplus; an odd p runs p + 1 with an
    inner rank left out.
    """
    require(ranks, micros)
    half = (ranks + 1) // 2
    work = max(micros + micros % 2, 4 * half)
    orders = []
    for r in range(ranks):
        inner = min(r, ranks - 1 - r)
        down, up = r, 2 * ranks - 1 - r
        near, far = ((down, 0), (up, 1)) if r < half else ((up, 1), (down, 0))
        micros_a, micros_b = range(near[1], work, 2), range(far[1], work, 2)
        phases = _dual_phases(half, inner, work // 2)
        orders.append(play(phases, {"a": near[0], "b": far[0]}, micros_a, micros_b))
    promise = (2 * half + 1,) * ranks
    full = Schedule(tuple(orders), v_placement(ranks), work, 2, name="dualpipe", promise=promise)
    return full if work == micros else full.without(micros)


def dualpipe_v(ranks: int, micros: int) -> Schedule:
    """DualPipe cut in half and folded to a V: the same order with one copy of the weights (Qi et al. 2025).

    Two half-size stages a rank, 2p + 1 of their activations. Needs m >= 2p; fewer run 2p without the surplus.
    """
    require(ranks, micros)
    work = max(micros, 2 * ranks)
    orders = tuple(
        play(_dual_phases(ranks, r, work), {"a": r, "b": 2 * ranks - 1 - r}, range(work), range(work))
        for r in range(ranks)
    )
    promise = (min(2 * micros, 2 * ranks + 1),) * ranks
    full = Schedule(orders, v_placement(ranks), work, name="dualpipe_v", promise=promise)
    return full if work == micros else full.without(micros)


def _dual_phases(half: int, inner: int, count: int) -> list[tuple[str, int]]:
    """DualPipe's eight phases on the rank `inner` steps from the end of `half` ranks, `count` micro-batches
    each way.
    """
    outer = half - inner - 1
    last = ["Bb" if i % 2 == 0 else "Ba" for i in range(2 * (inner + 1))]
    last[inner + 1 :] = [word.replace("B", "I") for word in last[inner + 1 :]]  # from here weights may wait
    return [
        ("Fa", 2 * outer),
        ("Fa Fb", inner + 1),
        ("Ib Wb Fb", outer),
        ("Fa Bb Fb Ba", count - 2 * half + inner + 1),
        ("Bb Fb Ba", outer),
        (" ".join(last), 1),
        ("W Ia", outer),
        ("W", inner + 1),
    ]
