"""Bidirectional schedules: two copies of the model, run in opposite directions, fill each other's bubbles."""

from .phases import play, v_placement
from .schedule import Op, Schedule


def chimera(ranks: int, micros: int) -> Schedule:
    """Two 1F1B pipelines in opposite directions, merged slot by slot (Li & Hoefler 2021, "Chimera").

    Even micro-batches run down the first copy, odd ones up the second, in groups of p. Bubble (p - 2) / (2m + p - 2)
    with equal forwards and backwards; 2 weights, p/2 + 1 to p activations. If m does not fill the last group, the
    surplus is left out; an odd p uses the schedule for p + 1 without an inner rank.
    """
    half = (ranks + 1) // 2
    unit = 2 * half
    work = -(-micros // unit) * unit
    orders, promise = [], []
    for r in range(ranks):
        down = r if r < half else unit - ranks + r
        slots = []  # one direction takes the even slots and the other the odd ones, so that they never collide
        for i in range(work):
            stage, place = (2 * ranks - 1 - r, unit - 1 - down) if i % 2 else (r, down)
            start = 2 * unit * (i // unit) + 2 * (i % unit // 2)
            slots.append((start + place, Op("F", stage, i)))
            slots.append((start + 2 * unit - 1 - place, Op("B", stage, i)))
        orders.append(tuple(op for _, op in sorted(slots)))
        promise.append(min(half, unit - down) + min(half, down + 1))
    full = Schedule(tuple(orders), v_placement(ranks), work, 2, name="chimera", promise=tuple(promise))
    return full.without(micros)


def dualpipe(ranks: int, micros: int) -> Schedule:
    """Both directions at once, a forward of one overlapped with a backward of the other (DeepSeek-V3 2024).

    Bubble (p/2 - 1)(F&B + B - 3W), B the whole backward; 2 weights, p + 1 activations. Needs m even and at least 2p:
    another m uses the schedule for the next such number without the surplus; an odd p uses the one for p + 1 without
    an inner rank.
    """
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
    return full.without(micros)


def dualpipe_v(ranks: int, micros: int) -> Schedule:
    """DualPipe cut in half and folded to a V: the same order with one copy of the weights (Qi et al. 2025).

    Two half-size stages per rank, 2p + 1 of their activations. Needs m >= 2p; fewer use the schedule for 2p without
    the surplus.
    """
    work = max(micros, 2 * ranks)
    orders = tuple(
        play(_dual_phases(ranks, r, work), {"a": r, "b": 2 * ranks - 1 - r}, range(work), range(work))
        for r in range(ranks)
    )
    promise = (min(2 * micros, 2 * ranks + 1),) * ranks
    return Schedule(orders, v_placement(ranks), work, name="dualpipe_v", promise=promise).without(micros)


def _dual_phases(half: int, inner: int, count: int) -> list[tuple[str, int]]:
    """DualPipe's eight phases with `count` micro-batches each way, on the rank `inner` from an end of 2 `half`."""
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
