"""Checkers of lesson 09: which version is read, a stash of versions, PipeDream's stages, 2BW, the SSP rule."""

from contextlib import suppress
from functools import partial
from inspect import unwrap
from itertools import accumulate, pairwise, product
from numbers import Integral
from unittest.mock import patch

import torch

from ...parallel.pipeline.versions import Stash
from ...schedules import Cost, Op, simulate
from ...schedules.asynchronous import free_running, make_stream
from ..labs import servers_on_arrival as servers
from . import Puzzle, Task, by_chance, refuse, run_there, unaided
from .watching import memories

SCHEMES = ("ampnet", "pipedream", "pipedream_vertical")


def _read(read, scheme: str, p: int, micros: int) -> dict[str, int]:
    ways = product(range(p), range(micros), "FB")
    return {f"version that {Op(k, s, t)} reads": read(scheme, p, s, t, k) for s, t, k in ways}


def _reads(scheme: str, p: int, micros: int) -> dict[str, int]:
    reads = make_stream(scheme, p, micros).reads
    return _read(lambda scheme, p, s, t, k: reads[Op(k, s, t)], scheme, p, micros)


version = Task(
    _reads,
    shown=[(scheme, p, 9) for scheme in SCHEMES for p in (1, 2, 3, 4)],
    what="{}, {} stages",
    drawn=lambda chance: (chance.choice(SCHEMES), chance.randint(5, 8), 14),
    call=_read,
    closed=("gpt2lab.schedules.asynchronous.make_stream",),
    count=4,
)
"""Exercise: the version that the forward or the backward of micro-batch t reads on stage s of p."""


STEPS = {  # what is done with a stash: (the versions that are there then, the one in use)
    "update": ({0, 1}, 1),
    "another update": ({0, 1, 2}, 2),
    "use(0)": ({0, 1, 2}, 0),
    "use(0), then use(2)": ({0, 1, 2}, 2),
    "use(1)": ({0, 1, 2}, 1),
    "use(0) again": ({0, 1, 2}, 0),
    "free({0, 2})": ({0, 2}, 0),
    "free({2}) with 0 in use": ({2}, 2),
    "updates to 3 and 4": ({2, 3, 4}, 4),
    "use(2)": ({2, 3, 4}, 2),
    "free({3, 4}) with 2 in use": ({3, 4}, 4),
}


def _holds(versions, used, p, q, size) -> dict:
    names = ("versions", "in use", "first parameter", "second parameter", "bytes")
    return dict(zip(names, (versions, used, p, q, size), strict=True))


def _stashed(answer: type) -> dict:
    """What a stash holds after each of STEPS, until one raises; version n has n and n / 3 in its parameters."""
    p, q = (torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (2, 1))
    mine, found = answer([p, q]), dict.fromkeys(STEPS)

    def update(*news: int) -> None:
        for new in news:
            mine.push()
            p.data.fill_(new)
            q.data.fill_(new / 3)
            mine.used = new

    free = lambda *wanted: mine.free(frozenset(wanted))
    deeds = [(update, 1), (update, 2), *((mine.use, n) for n in (0, 2, 1, 0)), (free, 0, 2), (free, 2)]
    with _by_itself(), suppress(KeyError, IndexError, ValueError):
        for what, (do, *given) in zip(
            STEPS, [*deeds, (update, 3, 4), (mine.use, 2), (free, 3, 4)], strict=True
        ):
            do(*given)
            found[what] = _holds(set(mine.versions), mine.used, p.tolist(), q.tolist(), mine.bytes)
    return found


steps = Task(
    lambda: {what: _holds(v, n, [n] * 2, [n / 3], 24 * len(v)) for what, (v, n) in STEPS.items()},
    shown={"after": ()},
    call=partial(run_there, _stashed),
)


def stash(answer: type, run) -> None:
    """Exercise: use, push and free of a stash. `run(cls)` gives the claims of a live pipeline that uses it.

    That one is the lesson's: where an answer has its own, the lesson's runs.
    """
    steps(answer)
    by_chance(lambda chance: _many_versions(answer, chance), 4)
    for claim in unwrap(run)(answer):
        assert claim.error <= 1e-10, (
            f"on live ranks: {claim.name} differs on rank {claim.rank} ({claim.error:.1e})"
        )


def _by_itself():
    """The package's stash is closed in the block."""
    return patch.multiple(Stash, push=_inherited, use=_inherited, free=_inherited)


def _inherited(*_) -> None:
    raise AssertionError(
        "push, use and free of the package's Stash are closed here: write all three yourself"
    )


def _many_versions(answer: type, chance) -> None:
    """Many versions in any order; every number of a version is that version's own."""
    used, versions, deeds = 0, {0}, []
    for kind in ["update"] * 4 + chance.choices(("update", "use", "free"), k=12):
        if kind == "update":
            used = max(versions) + 1
            versions = versions | {used}
        elif kind == "use":
            used = chance.choice(sorted(versions))
        else:
            versions = set(chance.sample(sorted(versions), chance.randint(1, len(versions))))
            used = used if used in versions else max(versions)
        deeds.append((kind, used, versions))
    for (kind, used, versions), (moved, mine, now, here, copies) in zip(
        deeds, run_there(_after_each, answer, deeds), strict=True
    ):
        refuse(
            f"after {kind}",
            {
                "a graph that was saved reads where the parameter was: copy values into p.data": moved,
                f"versions {sorted(versions)} are here, yours has {sorted(mine)}": mine != versions,
                f"version {used} is in use, yours is {now}, and holds {here}": (now, here) != (used, [used]),
                f"{copies} copies are in memory for {len(versions) - 1} kept versions: what is freed must go": copies
                >= len(versions),
            },
        )


def _after_each(answer: type, deeds: list) -> list[tuple]:
    """After each deed, until a wrong one: did the parameter move, versions, the one in use, what it holds, copies."""
    p, found = torch.nn.Parameter(torch.zeros(500, dtype=torch.float64)), []
    before, place, newest = memories(4000), p.data_ptr(), 0
    with _by_itself():
        mine = answer([p])
        for kind, used, versions in deeds:
            if kind == "update":
                mine.use(newest)
                mine.push()
                mine.used = used
                p.data.fill_(used)
            elif kind == "use":
                mine.use(used)
            else:
                mine.free(frozenset(versions))
            newest, copies = max(versions), len(memories(4000) - before)
            seen = p.data_ptr() != place, set(mine.versions), mine.used, p.detach().unique().tolist()
            found.append((*seen, copies))
            if seen != (False, versions, used, [used]) or copies >= len(versions):
                break
    return found


def _updates(old, new, rate: float, steps: int = 1) -> dict:
    """What some updates of 2BW give, the gradient of w being w / 2 + 1: versions, and where gradients are asked for."""
    versions = [old, new]
    for _ in range(steps):
        versions.append(versions[-1] - rate * (0.5 * versions[-2] + 1.0))
    return {"gradients are asked at": versions[:steps], "(old, new) after each": list(pairwise(versions[1:]))}


def _asked(answer, old, new, rate: float, steps: int = 1) -> dict:
    answer, asked, pairs = unaided(answer), [], [(old, new)]
    for _ in range(steps):
        pairs.append(answer(*pairs[-1], lambda w: asked.append(w) or 0.5 * w + 1.0, rate))
    return {"gradients are asked at": asked, "(old, new) after each": pairs[1:]}


double_buffered = Task(
    _updates,
    shown={
        "an update of (8, 4)": (8.0, 4.0, 0.5),
        "five updates in a row": (8.0, 4.0, 0.5, 5),
        "tensors, and another rate": (
            torch.tensor([8.0, 1.0]).double() / 3,
            torch.tensor([4.0, 2.0]).double() / 3,
            0.3,
        ),
    },
    call=_asked,
)
"""Exercise: one update of 2BW, from (old, new) weights to the next two."""


bounded = Task(
    servers.may_start,
    shown=[
        (clock, slowest, bound)
        for bound, clocks in ((0, 6), (1, 6), (3, 6), (None, 6), (2, 9), (5, 9))
        for clock in reversed(range(clocks))
        for slowest in range(clock + 1)
    ],
    what="bound {2}: a worker that has done {0} steps, the slowest {1}",
    drawn=lambda chance: (chance.randint(15, 30), chance.randint(0, 15), chance.choice((None, *range(30)))),
    closed=("gpt2lab.lessons.labs",),
)
"""Exercise: may a worker start its next step under SSP with a bound?"""


RANKS, MICROS, ROOM, BAR, BEST = 4, 16, 60, 500, 480
TIMES = (1, 4, 2, 3, 4, 2, 3, 4, 2, 3)
"""The puzzle: what the forward of each of ten layers takes (backward twice that); BEST is the least of 463 answers."""

WEIGHTS = (9, 6, 3, 4, 6, 3, 4, 6, 3, 9)
"""The room that each layer's weights take, once for every version that is kept."""


def _two_things(found) -> tuple[list[int], int]:
    two = isinstance(found, list) and len(found) == 2 and isinstance(found[0], list)
    assert two, "return two things: (layers of each stage, active)"
    layers, active = found
    whole = all(isinstance(n, Integral) for n in [*layers, active])
    assert whole, f"{layers}, {active}: how many, as whole numbers"
    return layers, active


def _no_stages(found) -> dict:
    layers, active = found
    said = {
        f"{layers}: every stage needs a layer": min(layers, default=0) <= 0,
        f"your stages have {sum(layers)} layers, and the model {len(TIMES)}": sum(layers) != len(TIMES),
        f"{len(layers)} stages need as many ranks, and there are {RANKS}": len(layers) > RANKS,
        f"active={active}: {len(layers)} stages have 1 to {len(layers)}": not 1 <= active <= len(layers),
    }
    for stage, (kept, one) in enumerate(room_of(layers, active) if not any(said.values()) else ()):
        room = f"{kept * one} in all, and there is room for {ROOM}"
        said[f"stage {stage} keeps {kept} versions of {one} units of weights, {room}"] = kept * one > ROOM
    return said


stages = Puzzle(
    lambda found: time_of(*found), "units of time", bar=BAR, best=BEST, read=_two_things, rules=_no_stages
)
"""Puzzle: how many layers each stage of PipeDream has, and how many micro-batches are in progress."""


def room_of(layers: list[int], active: int) -> list[tuple[int, int]]:
    """(versions kept, weights of one) of each stage."""
    stream = make_stream("pipedream", len(layers), MICROS, active=active)
    kept = [max(map(len, stream.held(stage))) for stage in range(len(layers))]
    return list(zip(kept, _by_stage(WEIGHTS, layers), strict=True))


def time_of(layers: list[int], active: int) -> int:
    """When all micro-batches are through."""
    times = _by_stage(TIMES, layers)
    schedule = free_running(len(layers), MICROS, active)
    return simulate(schedule, Cost(times, backward=[2 * t for t in times])).makespan


def _by_stage(numbers, layers: list[int]) -> list[int]:
    return [sum(numbers[end - n : end]) for end, n in zip(accumulate(layers), layers, strict=True)]
