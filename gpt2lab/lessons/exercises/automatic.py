"""Checkers of lesson 17: Alpa's recurrence for one t_max, a row of the integer program, stages with their cuts."""

import math
from dataclasses import replace
from functools import cache
from random import Random

from ...machine.links import Link
from ...planner.alpa import submeshes
from ...planner.cuts import Assignment, ChainProblem, Clock
from ..labs import automatic as lab
from . import Puzzle, Task, returned
from .guards import patient


def _prices(chance, operators: int) -> dict:
    """Seconds of the operators k..i-1 on m devices, by (k, i, m)."""
    return {
        (k, i, m): m * chance.randint(1, 9) + 4 * (i - k) ** 2
        for k in range(operators)
        for i in range(k + 1, operators + 1)
        for m in (1, 2, 4)
    }


def _cases(chance, operators: int, devices: int) -> list[tuple]:
    """A chain with a t_max that allows all stages, and with some that leave stages out."""
    prices = _prices(chance, operators)
    limits = sorted({*prices.values()})
    return [(prices, operators, devices, limit) for limit in [*limits[: 4 * operators : 3], math.inf]]


def _best(prices, operators: int, devices: int, t_max: float) -> float:
    """The least sum of the stages' seconds."""

    @cache
    def least(k: int, d: int) -> float:
        found = [math.inf if d else 0] if k == operators else []
        for (first, i, m), seconds in prices.items():
            if first == k and m <= d and seconds <= t_max:
                found.append(seconds + least(i, d - m))
        return min(found, default=math.inf)

    return least(0, devices)


def _asked(answer, prices, operators: int, devices: int, t_max: float) -> float:
    asked = []

    def cost(k, i, m):
        asked.append((k, i, m))
        assert (k, i, m) in prices, (
            f"you asked for operators {k}..{i - 1} on {m} devices: stages hold at least one of the {operators} "
            "operators, blocks have 1, 2 or 4 devices"
        )
        return prices[k, i, m]

    with patient(f"F of {operators} operators on {devices} devices"):
        found = answer(cost, operators, devices, t_max)
    possible = _best(prices, operators, devices, t_max) < math.inf
    assert asked or found is None or not possible, "you never ask cost() for a single stage"
    return found


recurrence = Task(
    _best,
    shown=[
        *(case for n in (2, 3, 4, 5) for d in (4, 2, 1) for case in _cases(Random(n), n, d)),
        (_prices(Random(0), 14), 14, 8, math.inf),
    ],
    what="{1} operators, {2} devices, t_max {3}",
    drawn=lambda chance: chance.choice(_cases(chance, chance.randint(1, 7), chance.randint(1, 8))),
    call=_asked,
)
"""Exercise: the least sum of the stages' seconds, none above t_max."""


def _row(i: int, a: int, b: int) -> list[int]:
    return [-(n == i) for n in range(a)] + [0] * b + [int(n // b == i) for n in range(a * b)]


def _scaled(row, i: int) -> list[float]:
    """A row times what makes the coefficient of s_v[i] -1; an equation stays the same."""
    row = [float(x) for x in row]
    return [-x / row[i] for x in row] if row[i : i + 1] != [0] and row else row


program_row = Task(
    lambda a, b: [_row(i, a, b) for i in range(a)],
    shown=[(2, 2), (3, 2), (2, 4), (3, 3)],
    what="v has {} strategies, u has {}",
    drawn=lambda chance: (chance.randint(2, 6), chance.randint(2, 6)),
    call=lambda answer, a, b: [_scaled(returned(answer(i, a, b)), i) for i in range(a)],
)
"""Exercise: the row that ties a row of e to a strategy of v."""


def puzzle() -> ChainProblem:
    """The chain of the puzzle: `lab.MODEL` on two nodes of two devices that have little memory and slow links."""
    given = lab.problem(slow=50e6, memory=24e6)
    network = replace(given.cluster.network, inside=Link(20e-6, 200e6))
    return replace(given, cluster=replace(given.cluster, network=network))


def puzzle_step(stages) -> tuple[float, list[float]]:
    """(milliseconds of a step, megabytes of every device) of stages such as (2, ["-S", "-P"]): devices, and cuts.

    A cut has two letters: what is cut between nodes, and inside them. S rows, A tokens, P weights, - nothing.
    """
    given, kinds = puzzle(), {letter: cut for cut, letter in lab.WORDS.items()}
    plan, first = [], 0
    for count, cuts in stages:
        plan += [Assignment(first, count, tuple(kinds[letter] for letter in cut)) for cut in cuts]
        first += count
    return 1e3 * Clock(given, tuple(plan)).seconds, [held / 1e6 for held in given.memory(tuple(plan))]


def _legal(given: ChainProblem, count: int, first: int, operator: int) -> list[str]:
    """The cuts that an operator may have on `count` devices from device `first` on."""
    if (first, count) not in submeshes(given.cluster.devices, given.cluster.network.node):
        return []
    return ["".join(lab.WORDS[c] for c in a.cut) for a in given.assignments(operator, (first, count))]


def _impossible(stages) -> dict:
    """Sentences about stages."""
    some = lambda x: isinstance(x, list | tuple)
    listed = some(stages) and all(some(s) and len(s) == 2 and some(s[1]) for s in stages)
    if not listed:
        return {
            f'return a list of stages, each (devices, [cuts]) such as (2, ["-S", "-P"]); got {stages!r}': True
        }
    given, counts = puzzle(), [count for count, _ in stages]
    operators, devices = len(given), given.cluster.devices
    cuts = [(count, cut) for count, cuts in stages for cut in cuts]
    first = [sum(counts[:number]) for number, (_, cuts) in enumerate(stages) for _ in cuts]
    said = {
        f"your stages have cuts for {len(cuts)} operators, and there are {operators}": len(cuts) != operators,
        f"your stages have {sum(counts)} devices, and there are {devices}": sum(counts) != devices,
        "a stage has no operator": not all(cuts for _, cuts in stages),
    }
    for number, (start, (count, cut)) in (
        enumerate(zip(first, cuts, strict=True)) if not any(said.values()) else ()
    ):
        legal, place = _legal(given, count, start, number), f"{count} devices from device {start} on"
        said[f"{place} are no part of a node by a power of two, nor whole nodes"] = not legal
        said[
            f"{cut!r} is no cut of an operator on {place}: two letters, between nodes and inside one, and - where "
            "there is one device"
        ] = cut not in legal
    if any(said.values()):
        return said
    milliseconds, held = puzzle_step(stages)
    most, room = max(held), given.cluster.device.memory / 1e6
    return {
        f"device {held.index(most)} holds {most:.1f} MB and has {room:g}: a row cut copies the weights to every "
        "device": most > room,
        f"{milliseconds:.1f} ms: one stage over both nodes sends over the slow link in every operator": (
            milliseconds > BAR and devices in counts
        ),
    }


BAR, BEST = 415.0, 409.9
staged = Puzzle(lambda stages: puzzle_step(stages)[0], "ms", BAR, BEST, rules=_impossible)
"""Puzzle: stages with the cuts of their operators, for devices with little memory; the score is milliseconds."""
