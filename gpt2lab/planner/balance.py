"""Cutting a chain of layers into stages: the slowest as fast as can be, with replicas, with warm-up and ending.

Times in seconds for one micro-batch, weights and activations in bytes, a bandwidth in bytes per second;
`activations[i]` is what layer i sends to layer i + 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations, pairwise

from ..machine.arguments import MORE, checked
from ..machine.patience import patiently


@dataclass(frozen=True)
class ChainStage:
    """The layers first..last - 1; a micro-batch on one of `replicas` devices (PipeDream) or cut over them (DAPPLE)."""

    first: int
    last: int
    replicas: int = 1


@checked(layers=(1, 10_000), stages=(1, 10_000))
def every_cut(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All ways of cutting a chain into non-empty stages, as bounds (0, ..., layers): (layers - 1) over (stages - 1)."""
    for inner in combinations(range(1, layers), stages - 1):
        yield 0, *inner, layers


@checked(times=0, bounds=0)
def slowest(times: Sequence[float], bounds: Sequence[int]) -> float:
    """The time of the slowest stage: what every further micro-batch costs."""
    if list(bounds) != sorted(bounds) or bounds and bounds[-1] > len(times):
        raise ValueError(
            f"bounds = {bounds} do not cut {len(times)} layers. Use rising ones, 0 to {len(times)}."
        )
    return max((sum(times[a:b]) for a, b in pairwise(bounds)), default=0)


@checked(times=0, stages=1)
def best_cut(times: Sequence[float], stages: int) -> tuple[int, ...]:
    """The bounds whose slowest stage is fastest, by dynamic programming in O(layers^2 stages).

    slowest(j, s) = min over i of max(slowest(i, s - 1), times i..j). Raises ValueError for more stages than layers.
    """
    if not 1 <= stages <= len(times):
        raise ValueError(
            f"{len(times)} layers cannot be cut into {stages} stages. Use 1 to {len(times)} stages."
        )
    total = [0, *accumulate(times)]
    best = {(j, 1): (total[j], (0, j)) for j in range(1, len(times) + 1)}
    for s in patiently(range(2, stages + 1), "numbers of stages"):
        for j in range(s, len(times) + 1):
            options = ((max(best[i, s - 1][0], total[j] - total[i]), i) for i in range(s - 1, j))
            value, i = min(options)
            best[j, s] = value, (*best[i, s - 1][1], j)
    return best[len(times), stages][1]


@checked(layers=0, stages=(1, 10**6))
def equal_count(layers: int, stages: int) -> tuple[int, ...]:
    """The bounds that give every stage as many layers as any other, or one more: the cut without looking."""
    return tuple(layers * s // stages for s in range(stages + 1))


@checked(forward=0, backward=0, weights=0, bandwidth=MORE, first=len, last=len, replicas=1, border=len)
@dataclass(frozen=True)
class Chain:
    """What PipeDream's and DAPPLE's planners look at: forward and backward times, weights, activations, the link."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    activations: tuple[float, ...]  # one for each border, so one less than layers
    bandwidth: float

    def __len__(self) -> int:
        return len(self.forward)

    def all_reduce(self, first: int, last: int, replicas: int) -> float:
        """Seconds of the sum of the gradients of these layers over replicas: 2 (m - 1) / m of the weights."""
        return 2 * (replicas - 1) / replicas * sum(self.weights[first:last]) / self.bandwidth

    def hop(self, border: int) -> float:
        """Seconds of what crosses before layer `border` in one direction; 0 at the ends of the chain."""
        return self.activations[border - 1] / self.bandwidth if 0 < border < len(self) else 0.0


@checked(first=0, last=0, replicas=1)
def pipedream_stage(chain: Chain, first: int, last: int, replicas: int) -> float:
    """T(i, j, m): seconds a micro-batch of a stage on m devices, computing or summing, whichever is longer.

    1/m max(sum of times, 2 (m - 1) weights / bandwidth): Narayanan et al. 2019, section 3.1.
    """
    compute = sum(chain.forward[first:last]) + sum(chain.backward[first:last])
    return max(compute / replicas, chain.all_reduce(first, last, replicas))


@checked()
def pipedream_cost(chain: Chain, stages: Sequence[ChainStage]) -> float:
    """The slowest stage, or border with both messages: what a plan costs for each micro-batch in steady state."""
    _check_stages(chain, stages)
    busy = [pipedream_stage(chain, s.first, s.last, s.replicas) for s in stages]
    return max(*busy, *(2 * chain.hop(s.last) for s in stages))


def _check_stages(chain: Chain, stages: Sequence[ChainStage]) -> None:
    bounds, n = [0, *(s.last for s in stages)], len(chain)
    rising = all(a < b for a, b in pairwise(bounds)) and [s.first for s in stages] == bounds[:-1]
    if not rising or bounds[-1] != n or min(s.replicas for s in stages) < 1:
        said = f"These stages are no cut of {n} layers. Use one behind the other, each on a device."
        raise ValueError(said)


@checked(devices=(1, 4096))
def pipedream(chain: Chain, devices: int) -> tuple[float, tuple[ChainStage, ...]]:
    """PipeDream's planner: the stages and replicas whose slowest is fastest, on at most so many devices.

    A(j, m) = min over i, m' of max(A(i, m - m'), 2 a_i / bandwidth, T(i..j, m')).
    """

    @cache
    def best(j: int, m: int):
        """The best plan of layers 0..j - 1 on exactly m devices."""
        found = [(pipedream_stage(chain, 0, j, m), (ChainStage(0, j, m),))]
        for i in range(1, j):
            for here in range(1, m):
                before, stages = best(i, m - here)
                value = max(before, 2 * chain.hop(i), pipedream_stage(chain, i, j, here))
                found.append((value, (*stages, ChainStage(i, j, here))))
        return min(found, key=lambda plan: plan[0])

    counts = patiently(range(1, devices + 1), "numbers of devices")
    return min((best(len(chain), m) for m in counts), key=lambda plan: plan[0])


@checked(micros=1)
def dapple_latency(chain: Chain, stages: Sequence[ChainStage], micros: int) -> float:
    """Seconds of a step by the stage that decides, the pivot: warm-up, steady phase and ending.

    Warm-up: the first micro-batch's forwards up to the pivot. Steady: (micros - 1) times the pivot's forward and
    backward. Ending: the last micro-batch's backwards from the pivot to a stage, and that stage's all-reduce; a stage
    behind the pivot ends its backwards earlier. Messages between stages are stages of their own. Fan et al. 2021,
    section 4.1; they choose the pivot by its steady phase, here it is the stage that makes the sum largest, so this
    is a longest path.
    """
    _check_stages(chain, stages)
    rows = _dapple_rows(chain, stages)
    found = []
    for q, (f, b, _) in enumerate(rows):
        endings = [rows[s][2] + sum(row[1] for row in rows[s : q + 1]) for s in range(q + 1)]
        endings += [rows[s][2] - sum(row[1] for row in rows[q + 1 : s + 1]) for s in range(q + 1, len(rows))]
        found.append(sum(row[0] for row in rows[: q + 1]) + (micros - 1) * (f + b) + max(endings))
    return max(found)


def _dapple_rows(chain, stages):
    """(forward, backward, all-reduce) of every stage, and between two of them of the messages."""
    rows = []
    for s in stages:
        if rows:
            rows.append((chain.hop(s.first), chain.hop(s.first), 0.0))
        rows.append(_dapple_row(chain, s.first, s.last, s.replicas))
    return rows


def _dapple_row(chain, first, last, replicas):
    f, b = sum(chain.forward[first:last]) / replicas, sum(chain.backward[first:last]) / replicas
    return f, b, chain.all_reduce(first, last, replicas)


@checked(devices=(1, 4096), micros=1)
def dapple(chain: Chain, devices: int, micros: int) -> tuple[float, tuple[ChainStage, ...]]:
    """The plan of least `dapple_latency` on at most so many devices, from the last stage to the first.

    What stands before a suffix of the chain changes its latency through three numbers: the latency itself, the same
    with the way back to the suffix's first stage for ending, and the latest all-reduce against that stage's backward.
    All are better when lower: for each (first layer, devices) the plans that no other beats in all three are enough.
    """

    def extended(row, state):
        """The three numbers with one more stage in front."""
        (f, b, sync), (latency, back, late) = row, state
        steady = f + (micros - 1) * (f + b)
        latency = max(f + latency, f + back + b + sync, steady + max(b + sync, late))
        return latency, max(f + back, steady) + b, max(sync, late) - b

    @cache
    def plans(first: int, m: int) -> list:
        """Plans of layers first.. on exactly m devices: [(three numbers, stages)], none beaten by another."""
        found = []
        for last in range(first + 1, len(chain) + 1):
            for here in range(1, m + 1):
                row, stage = _dapple_row(chain, first, last, here), ChainStage(first, last, here)
                if last == len(chain):
                    found += [(extended(row, NOTHING), (stage,))] if here == m else []
                    continue
                hop = chain.hop(last)
                for state, stages in plans(last, m - here) if m > here else ():
                    found.append((extended(row, extended((hop, hop, 0.0), state)), (stage, *stages)))
        return _unbeaten(found)

    counts = patiently(range(1, devices + 1), "numbers of devices")
    every = (plan for m in counts for plan in plans(0, m))
    state, stages = min(every, key=lambda plan: plan[0][0])
    return state[0], stages


NOTHING = (float("-inf"),) * 3  # the three numbers of no stage at all


def _unbeaten(plans):
    kept = []
    for state, stages in sorted(plans, key=lambda plan: plan[0]):
        if not any(all(a <= b for a, b in zip(other, state, strict=True)) for other, _ in kept):
            kept.append((state, stages))
    return kept


@checked(layers=(1, 10_000), devices=(1, 10_000))
def every_replicated(layers: int, devices: int) -> Iterator[tuple[ChainStage, ...]]:
    """All plans of stages with replicas on at most so many devices: what exhaustive search goes through."""
    for count in range(1, min(layers, devices) + 1):
        for bounds in every_cut(layers, count):
            for used in range(count, devices + 1):
                for shares in every_cut(used, count):
                    both = zip(pairwise(bounds), pairwise(shares), strict=True)
                    yield tuple(ChainStage(*cut, b - a) for cut, (a, b) in both)
