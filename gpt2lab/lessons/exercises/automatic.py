"""Checkers of lesson 17: Alpa's recurrence for one t_max, a row of the integer program, stages with their cuts."""

import itertools
import math
import random
from dataclasses import replace

from ...machine.links import Link
from ...planner.alpa import submeshes
from ...planner.cuts import Assignment, ChainProblem, Clock
from ..labs import automatic as lab
from . import returned, scored


def _prices(seed: int, operators: int, blocks=(1, 2, 4)):
    draw = random.Random(seed)
    return {
        (k, i, m): m * draw.randint(1, 9) + 4 * (i - k) ** 2
        for k in range(operators)
        for i in range(k + 1, operators + 1)
        for m in blocks
    }


def _plans(operators: int, devices: int, blocks=(1, 2, 4)):
    """Every way to cut a chain into stages, each with a block, that uses all devices."""
    for count in range(1, operators + 1):
        for inner in itertools.combinations(range(1, operators), count - 1):
            ends = (0, *inner, operators)
            for sizes in itertools.product(blocks, repeat=count):
                if sum(sizes) == devices:
                    yield [(a, b, m) for a, b, m in zip(ends, ends[1:], sizes, strict=False)]


def recurrence(answer) -> None:
    """Exercise: the least sum of the stages' seconds, none above t_max."""
    for seed, operators, devices in [(0, 3, 4), (1, 4, 4), (2, 4, 2), (3, 5, 4), (4, 3, 1)]:
        prices = _prices(seed, operators)
        plans = list(_plans(operators, devices))
        sums = sorted((sum(prices[s] for s in plan), plan) for plan in plans)
        for t_max in sorted({max(prices[s] for s in plan) for _, plan in sums})[:4] + [math.inf]:
            legal = [(t, plan) for t, plan in sums if max(prices[s] for s in plan) <= t_max]
            _compare(answer, prices, operators, devices, t_max, legal, sums)
    found = answer(lambda k, i, m: 5, 2, 2, 1)
    assert found == math.inf, (
        f"every stage takes 5 s and t_max is 1: nothing is allowed, so inf; got {found!r}"
    )


def _compare(answer, prices, operators, devices, t_max, legal, sums) -> None:
    asked: list[tuple] = []

    def cost(k, i, m):
        asked.append((k, i, m))
        assert (k, i, m) in prices, (
            f"you asked for operators {k}..{i - 1} on {m} devices: stages hold at least one of the {operators} "
            "operators, blocks have 1, 2 or 4 devices"
        )
        return prices[k, i, m]

    case = f"{operators} operators, {devices} devices, t_max {t_max}"
    found, (want, plan) = answer(cost, operators, devices, t_max), legal[0]
    returned(found)
    assert isinstance(found, int | float), f"{case}: return one number, the sum of seconds; got {found!r}"
    slow = min(max(prices[s] for s in p) for t, p in legal if t == want)
    assert found == want or found != slow, (
        f"{case}: {found} is the slowest stage. A micro-batch goes through all of them: add up their seconds"
    )
    assert found == want or found != sums[0][0], (
        f"{case}: {found} needs a stage slower than t_max; leave such stages out"
    )
    assert found == want or found != want + t_max, (
        f"{case}: {found} is {want} + t_max. The factor B - 1 comes later, outside the recurrence"
    )
    one = prices.get((0, operators, devices))
    assert found == want or found != one, (
        f"{case}: {found} is one stage for everything; {want} is possible with the stages {plan}"
    )
    assert found >= want, f"{case}: {found} is less than any plan that uses all {devices} devices, {want}"
    assert found == want, (
        f"{case}: got {found}, but the stages {plan} take {want}. Look at every end i and block m"
    )
    assert asked, f"{case}: right, but without asking cost() for a single stage"


SIZES = ((2, 2), (3, 2), (2, 4), (3, 3))


def program_row(answer) -> None:
    """Exercise: the row that ties a row of e to a strategy of v, tried in a whole program."""
    for a, b in SIZES:
        case = f"v has {a} strategies, u has {b}"
        rows = [answer(i, a, b) for i in range(a)]
        returned(rows[0])
        rows = [[float(x) for x in row] for row in rows]
        width = a + b + a * b
        assert all(len(row) == width for row in rows), (
            f"{case}: a row has a number for each of {a} + {b} + {a * b} = {width} variables, yours has {len(rows[0])}"
        )
        assert len({tuple(row) for row in rows}) == a, (
            f"{case}: all your rows are the same. Row i speaks of strategy i of v alone"
        )
        for i, row in enumerate(rows):
            _check_row(case, i, row, a, b)


def _check_row(case, i, row, a, b) -> None:
    assert any(row[:a]), f"{case}: s_v does not appear in row {i}, so e would not follow what v chooses"
    assert not any(row[a : a + b]), (
        f"{case}: row {i} speaks of s_u. The rows of e sum to s_v, its columns to s_u: that is another equation"
    )
    others = [n for n in range(a) if n != i and row[n]]
    assert not others, f"{case}: row {i} speaks of strategy {others[0]} of v as well"
    for v, u in itertools.product(range(a), range(b)):
        x = [0.0] * len(row)
        x[v] = x[a + u] = x[a + b + v * b + u] = 1.0
        value = sum(c * n for c, n in zip(row, x, strict=True))
        transposed = [row[a + b + n * a + i] for n in range(b)]
        assert value == 0 or not all(transposed), (
            f"{case}: row {i} finds e at place j a + i. e[i, j] is variable a + b + i b + j"
        )
        assert value == 0, (
            f"{case}: with strategies {v} and {u} chosen, row {i} gives {value:g} and not 0: are all e[{i}, j] in it, "
            "with the sign against s_v?"
        )
    assert all(row[a + b + i * b : a + b + i * b + b]), f"{case}: some e[{i}, j] is missing in row {i}"


BAR, BEST = 415.0, 409.9


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


def staged(answer) -> str:
    """Puzzle: stages with the cuts of their operators, for devices with little memory; the score is milliseconds."""
    given, stages = puzzle(), returned(answer())
    operators, devices = len(given), given.cluster.devices
    assert isinstance(stages, list) and all(isinstance(s, tuple) and len(s) == 2 for s in stages), (
        f'return a list of stages, each (devices, [cuts]) such as (2, ["-S", "-P"]); got {stages!r}'
    )
    said = sum(len(cuts) for _, cuts in stages)
    assert said == operators, f"your stages have cuts for {said} operators, and there are {operators}"
    used = sum(count for count, _ in stages)
    assert used == devices, f"your stages have {used} devices, and there are {devices}"
    first, number = 0, 0
    for count, cuts in stages:
        legal = (
            ["".join(lab.WORDS[c] for c in a.cut) for a in given.assignments(number, (first, count))]
            if (first, count) in submeshes(devices, given.cluster.network.node)
            else []
        )
        assert legal, (
            f"{count} devices from device {first} on are no part of a node by a power of two, nor whole nodes"
        )
        for cut in cuts:
            assert cut in legal, (
                f"{cut!r} is no cut of an operator on {count} devices from device {first} on: two letters, between "
                "nodes and inside one, and - where there is one device"
            )
        first, number = first + count, number + len(cuts)
    milliseconds, held = puzzle_step(stages)
    limit = given.cluster.device.memory / 1e6
    full = held.index(max(held))
    assert held[full] <= limit, (
        f"device {full} holds {held[full]:.1f} MB and has {limit:g}: a row cut copies the weights to every device"
    )
    across = any(count == devices for count, _ in stages)
    assert milliseconds <= BAR or not across, (
        f"{milliseconds:.1f} ms: one stage over both nodes sends over the slow link in every operator"
    )
    return scored(round(milliseconds, 1), "ms", bar=BAR, best=BEST)
