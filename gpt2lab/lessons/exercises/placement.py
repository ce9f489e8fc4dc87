"""Checkers of lesson 16: the critical path, the best cut of a chain, cuts for live ranks and for unlike devices."""

from itertools import pairwise
from numbers import Integral
from types import MappingProxyType

from ...machine.links import Link
from ...model import PRESETS, GPT2Config
from ...planner.balance import best_cut, equal_count, slowest
from ...planner.problem import STATE, Device, gpt2_layers
from ...schedules import Cost, make, simulate
from . import Puzzle, Task, returned
from .differences import listed
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


def _graph(chance) -> tuple[list[int], list[tuple[int, int]]]:
    """Operators in some order that edges follow; the edges themselves stand in any order."""
    times = [chance.randint(1, 9) for _ in range(chance.randint(1, 11))]
    edges = [(u, v) for v in range(len(times)) for u in range(v) if chance.random() < 0.3]
    chance.shuffle(edges)
    return times, edges


def _longest(times: list[int], edges: list[tuple[int, int]]) -> dict:
    ends = list(times)  # the longest path to the end of each operator; edges go from one to a later one
    for v in range(len(times)):
        ends[v] += max((ends[u] for u, w in edges if w == v), default=0)
    return {"steps of the path that are no edge": [], "seconds": max(ends), "seconds of the path": max(ends)}


def _path(answer, times: list[int], edges: list[tuple[int, int]]) -> dict:
    with patient(f"a graph of {len(times)} operators"):
        found = listed(answer(list(times), list(edges)))
    two = isinstance(found, list) and len(found) == 2 and isinstance(found[1], list)
    assert two, f"return two things, (seconds, [operators]); got {found!r}"
    seconds, path = found
    assert path and all(isinstance(n, Integral) and 0 <= n < len(times) for n in path), (
        f"the path is a list of numbers of operators, got {path!r}"
    )
    return {
        "steps of the path that are no edge": [step for step in pairwise(path) if step not in edges],
        "seconds": seconds,
        "seconds of the path": sum(times[n] for n in path),
    }


critical_path = Task(
    _longest,
    shown={
        **{f"times {times}, edges {edges}": (times, edges) for times, edges in GRAPHS},
        "a ladder of 14 squares": ([1, 2, 3] * 14 + [1], LADDER),
    },
    what="times {}, edges {}",
    drawn=_graph,
    call=_path,
    closed=("gpt2lab.planner", "gpt2lab.tasks"),
)
"""Exercise: the longest path of a graph, in seconds and as a list of operators."""


CHAINS = (
    ([1, 1, 1, 1, 4], 2),
    ([7, 1, 4, 5, 8, 1, 5], 3),
    ([5, 1, 1, 1, 1, 1], 3),
    ([2, 3, 4, 5, 6, 7], 3),
    ([1, 9, 1, 1, 1, 9, 1], 4),
    ([5, 6, 3, 6, 9, 1, 8, 7, 9], 4),
    ([4, 9, 2, 8, 4, 4, 5, 9, 9], 4),
    ([4, 7, 9, 6, 5, 3, 8, 2, 6, 1, 7, 9, 3, 5, 8, 4] * 2, 7),  # 736,281 cuts
)


def _checked(bounds, layers: int, stages: int) -> tuple[int, ...]:
    """Bounds of stages, if they are some."""
    returned(bounds)
    assert not isinstance(bounds, int | float), f"{bounds} is a time. Return the bounds, (0, ..., {layers})"
    bounds = tuple(listed(bounds))
    strange = [b for b in bounds if not isinstance(b, Integral)]
    assert not strange, f"bounds are whole numbers of layers, and {strange[0]!r} is none"
    assert bounds and bounds[0] == 0 and bounds[-1] == layers, (
        f"the bounds run from 0 to {layers}, so that no layer is lost; yours are {bounds}"
    )
    assert len(bounds) == stages + 1, f"{stages} stages have {stages + 1} bounds, yours are {bounds}"
    assert all(a < b for a, b in pairwise(bounds)), f"a stage of {bounds} has no layer"
    return bounds


def _slowest(answer, times: list[int], stages: int) -> float:
    with patient(f"{len(times)} layers in {stages} stages"):
        bounds = answer(list(times), stages)
    return slowest(times, _checked(bounds, len(times), stages))


def _chain(chance) -> tuple[list[int], int]:
    times = [chance.randint(1, 30) for _ in range(chance.randint(1, 14))]
    return times, chance.randint(1, len(times))


cut = Task(
    lambda times, stages: slowest(times, best_cut(times, stages)),
    shown=CHAINS,
    what="the slowest stage of {} in {} stages",
    drawn=_chain,
    call=_slowest,
    closed=("gpt2lab.planner",),
)
"""Exercise: the bounds of the stages of a chain whose slowest is fastest."""


TIMES = [(1.0, 0.0), *[(1.0, 2.0)] * 5, (4.0, 2.0)]  # the embedding, five blocks, the head
STEEP = [(0.0, 0.0), *[(5.0, 1.0)] * 2, *[(1.0, 2.0)] * 4, (0.5, 1.0)]
UNEVEN = [(0.5, 0.0), *[(3.0, 4.0)] * 2, *[(1.0, 2.0)] * 5, (2.0, 1.0)]


def _both(chance) -> tuple[float, float]:
    """Forward and backward of a layer, of which either may be the longer one."""
    return chance.randint(0, 20) / 2, chance.randint(0, 20) / 2


def _slowest_range(answer, times, stages: int) -> float:
    ranges, layers = list(returned(answer(list(times), stages))), len(times)
    assert len(ranges) == stages and all(isinstance(r, range) for r in ranges), (
        f"return a range of blocks for each of {stages} stages, as [range(0, 2), range(2, 5)]; got {ranges!r}"
    )
    blocks = [n for r in ranges for n in r]
    assert blocks == list(range(layers - 2)), (
        f"the stages hold the blocks {blocks}, and the model has the blocks 0 to {layers - 3} in this order. The "
        "embedding and the head are no blocks: they are the first and the last of the times"
    )
    return slowest([f + b for f, b in times], (0, *(r.stop + 1 for r in ranges[:-1]), layers))


balanced = Task(
    lambda times, stages: slowest(total := [f + b for f, b in times], best_cut(total, stages)),
    shown=[(TIMES, 2), (UNEVEN, 3), (STEEP, 2)],
    what="the slowest stage of {} in {} stages",
    drawn=lambda chance: ([_both(chance) for _ in range(chance.randint(6, 12))], 3),
    call=_slowest_range,
)


def split(answer) -> None:
    """Exercise: the blocks of two stages from (forward, backward) times, tried on live ranks."""
    from ... import Ranks
    from ..labs.placement import blocks_of, steps_with_cuts

    balanced(answer)
    config = GPT2Config(vocab_size=37, n_positions=8, n_layer=5, n_head=2, n_embd=8)
    with Ranks(2, echo=False) as ranks:
        cuts = [list(answer(list(TIMES), 2)), blocks_of((0, 3, 7))]
        results = ranks.run(steps_with_cuts, cuts, config, 4, 8, 2)
    (mine, other), *_ = [losses for _, losses in results]
    assert abs(mine - other) < 1e-5, f"live, your stages have the loss {mine:.4f} and others {other:.4f}"


LAYERS = gpt2_layers(PRESETS["gpt2"], rows=1, length=1024).operators
UNLIKE = MappingProxyType({"fast": Device(10e12, 1.1e9), "slow": Device(5e12, 1.4e9)})
"""Devices of the puzzle: the slow ones have more memory."""
HOP, MICROS, BAR, BEST = Link(10e-6, 10e9), 8, 392.0, 356.4


def unlike_step(bounds, devices) -> tuple[float, list[float]]:
    """(milliseconds of a 1F1B step, gigabytes of every stage) of GPT-2 cut at `bounds`, on devices such as "fast"."""
    times, held = [], []
    for stage, (a, b) in enumerate(pairwise(bounds)):
        flying = min(MICROS, len(devices) - stage)  # micro-batches whose activations wait for their backward
        times.append(sum(UNLIKE[devices[stage]].time(op.flops) for op in LAYERS[a:b]))
        held.append(sum(STATE * op.weights + flying * op.kept for op in LAYERS[a:b]) / 1e9)
    cost = Cost(times, backward=[2 * t for t in times], hop=HOP.time(LAYERS[0].output))
    return 1e3 * simulate(make("1f1b", len(times), MICROS), cost).makespan, held


def _bounds_and_devices(found) -> tuple:
    assert isinstance(found, tuple | list) and len(found) == 2 and not isinstance(found[0], int), (
        f"return two things: the five bounds, and the device of each stage; got {found!r}"
    )
    bounds, devices = found
    devices = devices.split() if isinstance(devices, str) else list(devices)
    assert sorted(devices) == ["fast", "fast", "slow", "slow"], (
        f"there are two fast devices and two slow ones, and your stages are on {devices}"
    )
    return _checked(bounds, len(LAYERS), 4), devices


def _no_room(found) -> dict:
    milliseconds, held = unlike_step(*found)
    said = {}
    for stage, (device, size) in enumerate(zip(found[1], held, strict=True)):
        room, kept = UNLIKE[device].memory / 1e9, min(MICROS, 4 - stage)
        said[
            f"stage {stage} holds {size:.2f} GB on a {device} device of {room:g} GB: weights, and the activations of "
            f"{kept} micro-batch{'es' * (kept > 1)}"
        ] = size > room
    equal = milliseconds > BAR and found[0] == equal_count(len(LAYERS), 4)
    return said | {f"{milliseconds:.1f} ms: equal numbers of layers, on devices that are not equal": equal}


unlike = Puzzle(
    lambda found: unlike_step(*found)[0], "ms", BAR, BEST, read=_bounds_and_devices, rules=_no_room
)
"""Puzzle: GPT-2 in four stages on two fast devices and two slow ones; the score is the milliseconds of a step."""
