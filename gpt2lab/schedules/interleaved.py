"""Schedules with several chunks of the model per rank, round robin: rank r holds stages r, r + p, r + 2p, ..."""

from .schedule import Op, Schedule


def interleaved(ranks: int, micros: int, chunks: int = 2) -> Schedule:
    """1F1B over v chunks per rank (Narayanan et al. 2021, "Efficient large-scale language model training").

    Bubble (p - 1) / (v m + p - 1) of the makespan, for v times as many messages and more activations. The published
    rule needs m to be a multiple of p; any other m uses the order of the next multiple without the surplus.
    """
    rounded = -(-micros // ranks) * ranks
    total = chunks * rounded
    orders, promise = [], []
    for r in range(ranks):
        forward = [Op("F", stage, i) for stage, i in _rounds(r, ranks, rounded, range(chunks))]
        backward = [Op("B", stage, i) for stage, i in _rounds(r, ranks, rounded, range(chunks - 1, -1, -1))]
        behind = ranks - 1 - r  # which is 1F1B's warm-up
        warm_up = min(total, behind if chunks == 1 else 2 * behind + (chunks - 1) * ranks)
        order = forward[:warm_up]
        for pair in zip(forward[warm_up:], backward, strict=False):
            order += pair
        orders.append(tuple(order + backward[total - warm_up :]))
        promise.append(min(chunks * micros, warm_up + 1))
    full = Schedule(tuple(orders), _dealt(ranks, chunks), rounded, name="interleaved", promise=tuple(promise))
    return full.without(micros)


def breadth_first(ranks: int, micros: int, chunks: int = 2) -> Schedule:
    """GPipe over v chunks per rank: all micro-batches through one chunk, then the next (Lamy-Poirier 2023).

    Bubble (p - 1) / (v m + p - 1) of the makespan when m >= p; every rank holds all v m activations.
    """
    orders = []
    for r in range(ranks):
        forward = [Op("F", c * ranks + r, i) for c in range(chunks) for i in range(micros)]
        backward = [Op("B", c * ranks + r, i) for c in range(chunks - 1, -1, -1) for i in range(micros)]
        orders.append(tuple(forward + backward))
    promise = (chunks * micros,) * ranks
    return Schedule(tuple(orders), _dealt(ranks, chunks), micros, name="breadth_first", promise=promise)


def _rounds(rank, ranks, micros, chunks):
    """Groups of p micro-batches: a group passes all chunks of the rank before the next group starts."""
    for first in range(0, micros, ranks):
        for chunk in chunks:
            for i in range(first, first + ranks):
                yield chunk * ranks + rank, i


def _dealt(ranks, chunks) -> tuple[int, ...]:
    return tuple(stage % ranks for stage in range(ranks * chunks))
