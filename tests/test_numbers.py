"""Every public function that asks for numbers or texts alone, at odd ones: one sentence, or a value that a slow check
confirms, and soon."""

import importlib
import inspect
import itertools
import math
import pkgutil
import re
import time
from fractions import Fraction
from functools import partial
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from gpt2lab import planner, schedules, sharding, tasks
from gpt2lab.planner.failures import share_lost
from gpt2lab.schedules import registry

ODD = (
    0,
    -1,
    1,
    2,
    3,
    7,
    0.5,
    10**12,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x",
    (),
    None,
    True,
    object(),
    {},
    b"",
)
ROOMS = planner, schedules, sharding, tasks
KINDS = {int, float, str, bool, "int", "float", "str", "bool", "int | None"}
SOON = 20  # five seconds, on a machine that does other things as well
SENTENCE = re.compile(r"[^\n]+[.?!]", re.DOTALL)
LATER = {"gpt2lab.planner.sends"}  # only called by predictions, which have checked the plan
BY_NAME = [generator.make for generator in registry.GENERATORS]  # only called by `make`


def functions():
    """(name, function, how many arguments it must have)"""
    for room in ROOMS:
        for info in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            module = importlib.import_module(info.name)
            for name, found in vars(module).items():
                own = inspect.isfunction(found) and found.__module__ == info.name and info.name not in LATER
                if own and not name.startswith("_") and found not in BY_NAME:
                    asked = inspect.signature(found).parameters.values()
                    needed = [p for p in asked if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
                    if needed and all(p.annotation in KINDS for p in needed):
                        yield f"{info.name}.{name}", found, len(needed)


FUNCTIONS = {name: (found, count) for name, found, count in functions()}
FUNCTIONS |= {
    f"gpt2lab.schedules.make.{name}": (partial(schedules.make, name), 2) for name in schedules.NAMES
}


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def blocks(devices: int, node: int) -> list[tuple[int, int]]:
    """Whole nodes, and a power of two of the devices of one: each (first, count) is asked."""
    node = min(node, devices)
    whole = lambda d, c: d % node == c % node == 0
    part = lambda d, c: c < node and c & (c - 1) == 0 and d // node == (d + c - 1) // node
    every = ((d, c) for d in range(devices) for c in range(1, devices - d + 1))
    return sorted(b for b in every if whole(*b) or part(*b))


def pipelines(operators: int, devices: int, node: int, cuts: int, at: int = 0) -> int:
    """One after the other: how many operators the next stage has, and on which block."""
    if operators == 0:
        return at == devices
    after = lambda n, c: pipelines(operators - n, devices, node, cuts, at + c)
    axes = lambda c: (c > 1) + (1 < node < c)
    options = [(n, c) for n in range(1, operators + 1) for d, c in blocks(devices, node) if d == at]
    return sum(cuts ** (n * axes(c)) * after(n, c) for n, c in options)


def told(text: str) -> float:
    """The number of a text with a unit."""
    units = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    number, unit = text.replace(",", "").split()
    assert "e+" not in number
    return float(number) * (units | {"ms": 1e-3, "s": 1, "min": 60, "h": 3600, "days": 86400})[unit]


def least_loss(found: float, save: float, failures: float) -> bool:
    lost = lambda interval: share_lost(interval, save, failures)
    return found == save == 0 or lost(found) <= min(lost(found * 0.999), lost(found * 1.001))


def wall_time(interval: float, save: float, failures: float) -> float:
    """Expected time over work, by the exact formula for failures that come at random."""
    return failures * math.expm1(min((interval + save) / failures, 700)) / interval


def least_time(found: float, save: float, failures: float) -> bool:
    if save >= 2 * failures or not save:
        return found == (failures if save else 0)
    tried = (wall_time(found * 1.01**k, save, failures) for k in range(-300, 300))
    return found <= failures and wall_time(found, save, failures) <= 1.03 * min(tried)


def sent_behind(chunks: int, compute: float, comm: float, together: bool) -> float:
    """The clock when the last chunk has been sent; without `together` computing waits for each message."""
    if chunks > 1000:  # each further one takes as long as any other
        last, before = (sent_behind(n, compute, comm, together) for n in (1000, 999))
        return last + (chunks - 1000) * (last - before)
    computed = sent = 0
    for _ in range(chunks):
        computed = (computed if together else sent) + compute
        sent = max(computed, sent) + comm
    return sent


def all_heard(found, n: int) -> bool:
    """Whether after these messages every rank knows something of every other."""
    known = [{rank} for rank in range(n)]
    for sources, targets, _ in found:
        for target, news in [(t, set(known[s])) for s, t in zip(sources, targets, strict=True)]:
            known[target] |= news
    return all(len(of) == n for of in known)


def slowest(n: int, mean: float, spread: float) -> float:
    """The mean of the largest of n normal numbers, by a sum."""
    z = np.linspace(-12, 12, 40001)
    below = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in z]) ** n
    return mean + spread * float(((z[1:] + z[:-1]) / 2 * np.diff(below)).sum())


def even(sizes, whole: int) -> bool:
    """Whether the sizes are as equal as they can be."""
    return sum(sizes) == whole and max(sizes) - min(sizes) <= 1


def whole_panels(found, inner: int, columns: int, rows: int) -> bool:
    """Whether the panels are all of both matrices' inner side, each once and in order."""
    for side, parts in ((0, columns), (1, rows)):
        sizes = [len(part) for part in np.array_split(np.arange(inner), parts)]
        seen = [
            sum(sizes[:owner]) + i
            for owner, cut in (panel[side] for panel in found)
            for i in range(inner)[cut]
        ]
        if seen != list(range(inner)):
            return False
    return True


SLOW = {  # whether a value is right, found in another way
    "alpa.submeshes": lambda found, devices, node: sorted(found) == blocks(devices, node),
    "alpa.count_pipelines": lambda found, *sizes: found == pipelines(*sizes),
    "balance.every_cut": lambda found, layers, stages: (
        sorted(found) == [(0, *cut, layers) for cut in combinations(range(1, layers), stages - 1)][:100]
    ),
    "balance.equal_count": lambda found, layers, stages: (
        len(found) == stages + 1 and even([b - a for a, b in pairwise(found)], layers)
    ),
    "balance.every_replicated": lambda found, layers, devices: (
        len(set(found))
        == len(found)
        == min(100, sum(math.comb(layers - 1, n - 1) * math.comb(devices, n) for n in range(1, layers + 1)))
    ),
    "choose.in_bytes": lambda found, size: math.isclose(told(found), size, rel_tol=0.06),
    "choose.in_seconds": lambda found, seconds: math.isclose(told(found), seconds, rel_tol=0.06),
    "cuts.block_mesh": lambda found, first, count, node: math.prod(found.values()) == count,
    "failures.best_interval": least_loss,
    "failures.daly_interval": least_time,
    "failures.share_lost": lambda found, interval, save, failures: close(
        found, save / interval + np.mean([(i + 0.5) / 1000 * interval for i in range(1000)]) / failures
    ),
    "metrics.speedup": lambda found, serial, parallel: close(found * parallel, serial),
    "metrics.efficiency": lambda found, speedup, workers: close(found * workers, speedup),
    "metrics.amdahl": lambda found, part, workers: close(1 / found, part + (1 - part) / workers),
    "metrics.gustafson": lambda found, part, workers: close(found, part + (1 - part) * workers),
    "metrics.karp_flatt": lambda found, speedup, workers: close(
        found, (1 / Fraction(speedup) - Fraction(1, workers)) / (1 - Fraction(1, workers))
    ),
    "metrics.sequential": lambda found, *times: close(found, sent_behind(*times, False)),
    "metrics.overlapped": lambda found, *times: close(found, sent_behind(*times, True)),
    "published_steps.step_flops": lambda found, b, s, layers, h, words: close(
        found, 4 * layers * (24 * b * s * h * h + 4 * b * s * s * h) + 3 * 2 * b * s * h * words
    ),
    "scale.equal_parts": lambda found, size, parts: len(found) == parts and even(found.tolist(), size),
    "scale.tree_sum": lambda found, n, size: all_heard(found, n),
    "scale.double_tree": lambda found, n, size: all_heard(found, n),
    "scale.hierarchical": lambda found, n, size: all_heard(found, n),
    "scale.all_to_all": lambda found, n, size: (
        sorted(p for f, t, _ in found for p in zip(f, t, strict=True))
        == [(a, b) for a in range(n) for b in range(n) if a != b]
    ),
    "scale.slowest_of": lambda found, n, mean, spread: abs(found - slowest(n, mean, spread)) <= 0.03 * spread,
    "search.accepts": lambda found, change, scale, draw: (
        found == (change <= 0 or scale > 0 and math.log(max(draw, 1e-300)) < -change / scale)
    ),
    "space.factors": lambda found, world: (
        sorted(found)
        == [sizes for sizes in product(range(1, world + 1), repeat=4) if math.prod(sizes) == world]
    ),
    "space.worlds": lambda found, devices: found == list(range(1, devices + 1)),  # of a small cluster
    "formulas.kept_for_weights": lambda found, tokens, width, layers: (
        found == layers * width * (tokens * sum((1, 1, 1, 4, 3, 1, 4, 1)) + sum((3, 1, 4, 1)) + 2 * 2)
    ),
    "phases.v_placement": lambda found, ranks: list(found) == [*range(ranks), *reversed(range(ranks))],
    "schedule.require": lambda found, *sizes: min(sizes) >= 1,
    "gpt2.dimensions": lambda found, name: found == ("embd",),  # biases and norms
    "marks.megatron": lambda found, axis: {mark.layout.split(":")[1] for mark in found.values()} == {axis},
    "marks.batch": lambda found, axis: [mark.layout for mark in found.values()] == [f"batch:{axis}"],
    "marks.sequence": lambda found, axis: [mark.layout for mark in found.values()] == [f"seq:{axis}"],
    "products.panels": whole_panels,
    "products.least": lambda found, m, n, k, ranks: (
        0 <= found <= m * k + k * n + m * n and bool(found) == (ranks > 1)
    ),
    "propagate.owner": lambda found, result: found == "",
    "tofu.beyond": lambda found, value: found != value,
    "gpt2.ranges": lambda found, length, size: (
        [i for a, b in found for i in range(a, b)] == list(range(length))
        and all(b - a == (size or length) for a, b in found[:-1])
    ),
}
SLOW |= {f"graph.{mode}": lambda found, tensor, mode=mode: (found.mode, found.tensor) == (mode, tensor)
         for mode in ("reads", "writes", "updates", "reduces", "concurrent")}  # fmt: skip
MADE = "asynchronous", "make"  # give schedules


def answered(name: str, call, *values) -> str:
    """What is wrong with the answer to a call; empty for a right value or one sentence."""
    begin = time.perf_counter()
    try:
        found = call(*values)
        if inspect.isgenerator(found):
            found = list(itertools.islice(found, 100))
    except Exception as error:
        sentence = isinstance(error, ValueError | TypeError) and SENTENCE.fullmatch(str(error))
        return "" if sentence else f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - begin
    if seconds >= SOON:
        return f"an answer after {seconds:.0f} s"
    check = (lambda made, *_: schedules.check(made)) if name.split(".")[0] in MADE else SLOW[name]
    return "" if check(found, *values) else f"wrong: {found}"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_odd_numbers_are_answered_with_a_value_or_a_sentence(name):
    """All arguments alike, and each alone beside twos."""
    call, count = FUNCTIONS[name]
    bad = {}
    for value in ODD:
        alone = ([value if i == k else 2 for k in range(count)] for i in range(count))
        for values in ([value] * count, *alone):
            if said := answered(name.split(".", 2)[2], call, *values):
                bad[repr(values)] = said
    assert not bad


def test_there_are_many_of_them():
    assert len(FUNCTIONS) > 60
