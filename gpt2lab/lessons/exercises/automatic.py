"""Checkers of lesson 17: Alpa's recurrence for one t_max, and one row of the integer program inside a stage."""

import itertools
import math
import random

from . import returned


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
