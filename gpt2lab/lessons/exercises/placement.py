"""Checkers of lesson 16: the critical path, the best cut of a chain, cuts for live ranks and for unlike devices."""

import random
from itertools import pairwise
from numbers import Integral
from types import MappingProxyType

from ...machine.links import Link
from ...model import PRESETS
from ...planner.balance import best_cut, equal_count, slowest
from ...planner.pipelines import time_of_1f1b
from ...planner.problem import STATE, Device, gpt2_layers
from . import Puzzle, by_chance, called, returned, unaided
from .guards import patient

GRAPHS = (  # (times, edges): the longest path is neither the one of most operators nor the greedy one
    ([1, 1, 8, 2], [(0, 1), (2, 3)]),
    ([2, 9, 1, 1, 1, 3], [(0, 1), (0, 2), (2, 3), (3, 4), (1, 5), (4, 5)]),
    ([1, 5, 4, 1, 9], [(0, 1), (0, 2), (1, 3), (2, 4)]),
    ([7, 1, 1, 2], [(1, 2), (2, 3)]),
    ([3, 2, 2, 6, 1], [(0, 2), (1, 2), (2, 3), (2, 4)]),
)


LADDER = [edge for u in range(0, 42, 3) for edge in ((u, u + 1), (u, u + 2), (u + 1, u + 3), (u + 2, u + 3))]
"""Edges of 43 operators with 16,384 paths."""


def critical_path(answer) -> None:
    """Exercise: the longest path of a graph, in seconds and as a list of operators."""
    for times, edges in GRAPHS:
        _critical(answer, times, edges)
    with patient("a ladder of 14 squares", 40_000):
        found = answer([1, 2, 3] * 14 + [1], list(LADDER))
    assert found[0] == 57, (
        f"43 operators in a ladder of 14 squares: {found[0]}, but its longest path takes 57"
    )
    by_chance(lambda chance: _critical(answer, *_graph(chance)))


def _graph(chance) -> tuple[list[int], list[tuple[int, int]]]:
    """Operators in some order that edges follow; the edges themselves stand in any order."""
    times = [chance.randint(1, 9) for _ in range(chance.randint(1, 11))]
    edges = [(u, v) for v in range(len(times)) for u in range(v) if chance.random() < 0.3]
    chance.shuffle(edges)
    return times, edges


def _critical(answer, times: list[int], edges: list[tuple[int, int]]) -> None:
    case = f"times {times}, edges {edges}"
    found = called(answer, (list(times), list(edges)), case)
    assert isinstance(found, tuple | list) and len(found) == 2, (
        f"{case}: return two things, (seconds, [operators]); got {found!r}"
    )
    seconds, path = found
    want, best = _longest(times, edges)
    assert len(path) and all(isinstance(n, Integral) and 0 <= n < len(times) for n in path), (
        f"{case}: the path is a list of numbers of operators, got {path!r}"
    )
    broken = [(u, v) for u, v in pairwise(path) if (u, v) not in edges]
    assert not broken, f"{case}: your path goes from {broken[0][0]} to {broken[0][1]}, but no edge does"
    length = sum(times[n] for n in path)
    assert seconds != sum(times) or want == sum(times), (
        f"{case}: {seconds} is all work. Operators that do not wait for each other can run at the same time"
    )
    assert seconds == length, f"{case}: your path {path} takes {length}, and you say {seconds}"
    most = max(_paths(times, edges), key=len)
    assert length == want or len(path) < len(most) or length != sum(times[n] for n in most), (
        f"{case}: {path} has the most operators, but {best} takes longer: {want} against {length}"
    )
    assert length == want, f"{case}: {path} takes {length}, but {best} takes {want}. Look at all paths"


def _paths(times, edges):
    def on(n):
        after = [v for u, v in edges if u == n]
        return [[n, *rest] for v in after for rest in on(v)] or [[n]]

    return [path for n in range(len(times)) for path in on(n)]


def _longest(times, edges):
    best = max(_paths(times, edges), key=lambda path: sum(times[n] for n in path))
    return sum(times[n] for n in best), best


CHAINS = (
    ([1, 1, 1, 1, 4], 2),
    ([7, 1, 4, 5, 8, 1, 5], 3),
    ([5, 1, 1, 1, 1, 1], 3),
    ([2, 3, 4, 5, 6, 7], 3),
    ([1, 9, 1, 1, 1, 9, 1], 4),
)


def cut(answer) -> None:
    """Exercise: the bounds of the stages of a chain whose slowest is fastest."""
    answer = unaided(answer, "gpt2lab.planner")
    draw = random.Random(5)
    cases = [*CHAINS, *(([draw.randint(1, 9) for _ in range(9)], 4) for _ in range(4))]
    for times, stages in cases:
        _cut_well(answer, times, stages)
    with patient("32 layers in 7 stages"):  # 736,281 cuts
        answer([draw.randint(1, 9) for _ in range(32)], 7)
    by_chance(lambda chance: _cut_well(answer, *_chain(chance)))


def _chain(chance) -> tuple[list[int], int]:
    times = [chance.randint(1, 30) for _ in range(chance.randint(1, 14))]
    return times, chance.randint(1, len(times))


def _cut_well(answer, times: list[int], stages: int) -> None:
    case, best = f"{times} in {stages} stages", slowest(times, best_cut(times, stages))
    bounds = _checked(answer(list(times), stages), len(times), stages, case)
    found = slowest(times, bounds)
    sums = [sum(times[a:b]) for a, b in pairwise(bounds)]
    assert found == best or list(bounds) != list(equal_count(len(times), stages)), (
        f"{case}: {sums} are equal numbers of layers, not equal times. Instead of {found}, {best} is possible"
    )
    assert found == best, (
        f"{case}: your stages take {sums}, the slowest {found}, but {best} is possible. What is best for the "
        "first layers depends on where the cut after them is: try all of them"
    )


def _checked(bounds, layers, stages, case):
    returned(bounds)
    assert not isinstance(bounds, int | float), (
        f"{case}: {bounds} is a time. Return the bounds, (0, ..., {layers})"
    )
    bounds = tuple(bounds)
    strange = [b for b in bounds if not isinstance(b, Integral)]
    assert not strange, f"{case}: bounds are whole numbers of layers, and {strange[0]!r} is none"
    assert bounds and bounds[0] == 0 and bounds[-1] == layers, (
        f"{case}: the bounds run from 0 to {layers}, so that no layer is lost; yours are {bounds}"
    )
    assert len(bounds) == stages + 1, f"{case}: {stages} stages have {stages + 1} bounds, yours are {bounds}"
    assert all(a < b for a, b in pairwise(bounds)), f"{case}: a stage of {bounds} has no layer"
    return bounds


TIMES = [(1.0, 0.0), *[(1.0, 2.0)] * 5, (4.0, 2.0)]  # the embedding, five blocks, the head
STEEP = [(0.0, 0.0), *[(5.0, 1.0)] * 2, *[(1.0, 2.0)] * 4, (0.5, 1.0)]
UNEVEN = [(0.5, 0.0), *[(3.0, 4.0)] * 2, *[(1.0, 2.0)] * 5, (2.0, 1.0)]


def split(answer) -> None:
    """Exercise: the blocks of two stages from (forward, backward) times, tried on live ranks."""
    from ... import Ranks
    from ...model import GPT2Config
    from ..labs.placement import blocks_of, steps_with_cuts

    config = GPT2Config(vocab_size=37, n_positions=8, n_layer=5, n_head=2, n_embd=8)
    ranges = _balanced(answer, TIMES, 2)
    _balanced(answer, UNEVEN, 3)
    _balanced(answer, STEEP, 2)
    by_chance(lambda chance: _balanced(answer, [_both(chance) for _ in range(chance.randint(6, 12))], 3))
    with Ranks(2, echo=False) as ranks:
        results = ranks.run(steps_with_cuts, [ranges, blocks_of((0, 3, 7))], config, 4, 8, 2)
    (mine, other), *_ = [losses for _, losses in results]
    assert abs(mine - other) < 1e-5, f"live, your stages have the loss {mine:.4f} and others {other:.4f}"


def _both(chance) -> tuple[float, float]:
    """Forward and backward of a layer, of which either may be the longer one."""
    return chance.randint(0, 20) / 2, chance.randint(0, 20) / 2


def _balanced(answer, times, stages: int):
    """The answer's ranges of blocks, which must be as balanced as can be."""
    total, layers = [f + b for f, b in times], len(times)
    best = slowest(total, best_cut(total, stages))
    ranges = returned(answer(list(times), stages))
    assert len(ranges) == stages and all(isinstance(r, range) for r in ranges), (
        f"return a range of blocks for each of {stages} stages, as [range(0, 2), range(2, 5)]; got {ranges!r}"
    )
    blocks = [n for r in ranges for n in r]
    assert blocks == list(range(layers - 2)), (
        f"the stages hold the blocks {blocks}, and the model has the blocks 0 to {layers - 3} in this order. The "
        "embedding and the head are no blocks: they are the first and the last of the times"
    )
    bounds = (0, *(r.stop + 1 for r in ranges[:-1]), layers)
    found, naive = slowest(total, bounds), slowest(total, equal_count(layers, stages))
    assert found == best or bounds != best_cut([f for f, _ in times], stages), (
        f"your slowest stage takes {found:g}, {best:g} is possible: backward takes time too, not always twice forward"
    )
    assert found != naive or found == best, (
        f"your slowest stage takes {found:g}, as with equal counts; {best:g} is possible. The head is not like a block"
    )
    assert found == best, f"your slowest stage takes {found:g}, but {best:g} is possible"
    return ranges


LAYERS = gpt2_layers(PRESETS["gpt2"], rows=1, length=1024).operators
UNLIKE = MappingProxyType({"fast": Device(10e12, 1.1e9), "slow": Device(5e12, 1.4e9)})
"""Devices of the puzzle: the slow ones have more memory."""
HOP, MICROS, BAR, BEST = Link(10e-6, 10e9), 8, 392.0, 356.4


def unlike_step(bounds, devices) -> tuple[float, list[float]]:
    """(milliseconds of a 1F1B step, gigabytes of every stage) of GPT-2 cut at `bounds`, on devices such as "fast"."""
    times, held = [], []
    for stage, (a, b) in enumerate(pairwise(bounds)):
        flying = min(
            MICROS, len(devices) - stage
        )  # activations of so many micro-batches wait for their backward
        times.append(sum(UNLIKE[devices[stage]].time(op.flops) for op in LAYERS[a:b]))
        held.append(sum(STATE * op.weights + flying * op.kept for op in LAYERS[a:b]) / 1e9)
    seconds = time_of_1f1b(times, [2 * t for t in times], HOP.time(LAYERS[0].output), MICROS)
    return 1e3 * seconds, held


def _bounds_and_devices(found) -> tuple:
    assert isinstance(found, tuple) and len(found) == 2 and not isinstance(found[0], int), (
        f"return two things: the five bounds, and the device of each stage; got {found!r}"
    )
    bounds, devices = found
    devices = devices.split() if isinstance(devices, str) else list(devices)
    assert sorted(devices) == ["fast", "fast", "slow", "slow"], (
        f"there are two fast devices and two slow ones, and your stages are on {devices}"
    )
    return _checked(bounds, len(LAYERS), 4, "GPT-2"), devices


def _no_room(found) -> dict:
    milliseconds, held = unlike_step(*found)
    said = {}
    for stage, (device, size) in enumerate(zip(found[1], held, strict=True)):
        room, kept = UNLIKE[device].memory / 1e9, min(MICROS, 4 - stage)
        said[
            f"stage {stage} holds {size:.2f} GB on a {device} device of {room:g} GB: weights, and the activations of "
            f"{kept} micro-batch{'es' * (kept > 1)}"
        ] = size > room
    equal = found[0] == equal_count(len(LAYERS), 4)
    return said | {
        f"{milliseconds:.1f} ms: equal numbers of layers, on devices that are not equal": (
            milliseconds > BAR and equal
        )
    }


unlike = Puzzle(
    lambda found: unlike_step(*found)[0],
    "ms",
    bar=BAR,
    best=BEST,
    read=_bounds_and_devices,
    rules=_no_room,
)
"""Puzzle: GPT-2 in four stages on two fast devices and two slow ones; the score is the milliseconds of a step."""
