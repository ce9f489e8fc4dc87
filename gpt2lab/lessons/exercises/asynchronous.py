"""Checkers of lesson 09: which version is read, a stash of versions, PipeDream's stages, 2BW, the SSP rule."""

from itertools import accumulate, product
from numbers import Integral
from unittest.mock import patch

import torch

from ...parallel.pipeline.versions import Stash
from ...schedules import Cost, Op, simulate
from ...schedules.asynchronous import free_running, make_stream
from ..labs import servers_on_arrival as servers
from . import Puzzle, Task, by_chance, close, refuse, returned
from .differences import equal
from .watching import memories

SCHEMES = ("ampnet", "pipedream", "pipedream_vertical")


def _read(answer, scheme: str, p: int, micros: int) -> dict[Op, int]:
    return {Op(k, s, t): answer(scheme, p, s, t, k) for s, t, k in product(range(p), range(micros), "FB")}


def _misread(found: dict[Op, int], scheme: str, p: int, micros: int) -> dict:
    right = make_stream(scheme, p, micros).reads
    op = next(
        (op for op in found if found[op] != right[op] or not isinstance(found[op], Integral)), Op("F", 0, 0)
    )
    got, want, forward = found[op], right[op], right[op._replace(kind="F")]
    returned(got)
    return {
        f"a version is a whole number, not {got!r}": not isinstance(got, Integral),
        f"{op} cannot read version {got}: the first version is 0": got < 0,
        f"nothing is stashed, so {op} finds version {want}, not {got}": want != got == forward,
        f"{op} must read version {want}, which its forward read": op.kind == "B" and forward == want != got,
        f"vertical sync, all stages read what stage 0 reads; {op}: {want}, not {got}": (
            got != want and scheme == "pipedream_vertical"
        ),
        f"before {op} the stage has updated {want} times, you say {got}. Walk along its order": got != want,
    }


version = Task(
    None,
    shown=[(scheme, p, 9) for scheme in SCHEMES for p in (1, 2, 3, 4)],
    what="{}, {} stages",
    drawn=lambda chance: (chance.choice(SCHEMES), chance.randint(5, 8), 14),
    call=_read,
    rules=_misread,
    closed=("gpt2lab.schedules.asynchronous.make_stream",),
    count=4,
)
"""Exercise: the version that the forward or the backward of micro-batch t reads on stage s of p."""


def stash(answer: type, run) -> None:
    """Exercise: use, push and free of a stash. `run(cls)` gives the claims of a live pipeline that uses it."""
    with patch.multiple(Stash, push=_inherited, use=_inherited, free=_inherited):
        _stashed(answer)
        by_chance(lambda chance: _many_versions(answer, chance), 4)
    for claim in run(answer):
        assert claim.error <= 1e-10, (
            f"on live ranks: {claim.name} differs on rank {claim.rank} ({claim.error:.1e})"
        )


def _inherited(*_) -> None:
    raise AssertionError(
        "push, use and free of the package's Stash are closed here: write all three yourself"
    )


def _many_versions(answer: type, chance) -> None:
    """Many versions in any order; every number of a version is that version's own."""
    p = torch.nn.Parameter(torch.zeros(500, dtype=torch.float64))
    before = memories(4000)
    mine, used, versions = answer([p]), 0, {0}
    for kind in ["update"] * 4 + chance.choices(("update", "use", "free"), k=12):
        if kind == "update":
            mine.use(max(versions))
            mine.push()
            used = mine.used = max(versions) + 1
            p.data.fill_(used)
            versions.add(used)
        elif kind == "use":
            used = chance.choice(sorted(versions))
            mine.use(used)
        else:
            versions = set(chance.sample(sorted(versions), chance.randint(1, len(versions))))
            mine.free(frozenset(versions))
            used = used if used in versions else max(versions)
        here, copies = p.detach().unique().tolist(), len(memories(4000) - before)
        refuse(
            f"after {kind}",
            {
                f"versions {sorted(versions)} are here, yours has {sorted(mine.versions)}": mine.versions
                != versions,
                f"version {used} is in use, yours is {mine.used}, and holds {here}": (mine.used, here)
                != (used, [used]),
                f"{copies} copies are in memory for {len(versions) - 1} kept versions: what is freed must go": copies
                >= len(versions),
            },
        )


def _stashed(answer: type) -> None:
    p, q = (torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (2, 1))
    mine = answer([p, q])
    for new in (1, 2):
        mine.push()
        p.data.fill_(new)
        q.data.fill_(new / 3)
        mine.used = new
    assert mine.versions == {0, 1, 2}, (
        f"after two pushes versions 0, 1, 2 are there, yours has {sorted(mine.versions)}"
    )
    mine.use(0)
    assert p.tolist() == [0, 0], (
        f"use(0) must bring back the zeros that push saw, here are {p.tolist()}: a copy?"
    )
    mine.use(2)
    assert p.tolist() == [2, 2], (
        f"use(0), then use(2): version 2 is lost, here are {p.tolist()}. Exchange, do not drop"
    )
    assert mine.versions == {0, 1, 2}, (
        f"use() makes no version and drops none, but now there are {sorted(mine.versions)}"
    )
    mine.use(1)
    assert q.item() == 1 / 3, (
        f"version 1 had 1/3 in the second parameter, use(1) brings {q.item()!r}: copy all"
    )
    size = 8 * (p.numel() + q.numel())
    assert mine.bytes == 3 * size, (
        f"three versions are {3 * size} bytes, yours are {mine.bytes}: one is there twice"
    )
    mine.use(0)
    mine.free(frozenset({0, 2}))
    assert 1 not in mine.versions, f"free() forgets nothing: {{0, 2}} leaves {sorted(mine.versions)}"
    mine.free(frozenset({2}))
    assert mine.versions == {2}, (
        f"version 0 is freed while it is in use: {{2}} leaves {sorted(mine.versions)}; the newest must take its place"
    )
    assert p.tolist() == [2, 2], "version 0 was in use when it was freed: the newest must take its place"
    mine.push()
    mine.used = 3
    mine.push()
    mine.used = 1
    mine.free(frozenset({2, 3}))
    assert mine.used == 3, (
        f"versions 2 and 3 are wanted, 1 was in use: the newest takes its place, not {mine.used}"
    )


def double_buffered(answer) -> None:
    """Exercise: one update of 2BW, from (old, new) weights to the next two."""
    asked = []

    def gradient(w):
        asked.append(w)
        return 0.5 * w + 1.0

    old, new, lr = 8.0, 4.0, 0.5
    got = returned(answer(old, new, gradient, lr))
    assert len(got) == 2, f"return two versions, (old, new); yours has {len(got)}"
    assert len(asked) == 1, f"an update needs one gradient, yours computed {len(asked)}"
    assert asked[0] != new, (
        "your gradient is at the newest weights: that is a pipeline with a flush. Which does 2BW read?"
    )
    close(asked[0], old, "the gradient is taken at the older weights")
    assert got[1] != old - lr * 5.0, (
        "the gradient is right, but it must be added to the newest weights, not to the old ones"
    )
    close(got[1], new - lr * 5.0, "the new version, W(t) - lr g(W(t-1))")
    close(got[0], new, "after the update the version before it becomes the old one")
    path = [(old, new)]
    for _ in range(4):
        path.append(answer(*path[-1], gradient, lr))
    want = [old, new]
    for _ in range(4):
        want.append(want[-1] - lr * (0.5 * want[-2] + 1.0))
    close([w for _, w in path], want[1:], "five versions in a row")
    old, new = torch.tensor([8.0, 1.0]).double() / 3, torch.tensor([4.0, 2.0]).double() / 3
    given = old.clone(), new.clone()
    kept, made = answer(*given, lambda w: 0.5 * w + 1.0, 0.25)
    close(made, new - 0.25 * (0.5 * old + 1.0), "the same with tensors, and another rate")
    close(kept, new, "with tensors the version before it is a tensor of its own: change nothing in place")
    assert equal(given, (old, new)), (
        "your function writes into a version that it was given, from which a micro-batch may still read"
    )


def _starts_wrongly(got, clock: int, slowest: int, bound: int | None) -> dict:
    lead, wrong = clock - slowest, bool(got) != servers.may_start(clock, slowest, bound)
    more = ", that is one too many" * (bool(got) and bound is not None and lead == bound + 1)
    return {
        "nobody would ever start, a deadlock": wrong and not lead,
        "without a bound nobody waits": wrong and bound is None,
        f"it is {lead} ahead and must {'not ' * bool(got)}start{more}": wrong,
    }


bounded = Task(
    None,
    shown=[
        (clock, slowest, bound)
        for bound, clocks in ((0, 6), (1, 6), (3, 6), (None, 6), (2, 9), (5, 9))
        for clock in reversed(range(clocks))
        for slowest in range(clock + 1)
    ],
    what="bound {2}: a worker that has done {0} steps, the slowest {1}",
    drawn=lambda chance: (chance.randint(15, 30), chance.randint(0, 15), chance.choice((None, *range(30)))),
    rules=_starts_wrongly,
    closed=("gpt2lab.lessons.labs",),
)
"""Exercise: may a worker start its next step under SSP with a bound?"""


RANKS, MICROS, ROOM, BAR, BEST = 4, 16, 60, 500, 480
TIMES = (1, 4, 2, 3, 4, 2, 3, 4, 2, 3)
"""The puzzle: what the forward of each of ten layers takes (backward twice that); BEST is the least of 463 answers."""

WEIGHTS = (9, 6, 3, 4, 6, 3, 4, 6, 3, 9)
"""The room that each layer's weights take, once for every version that is kept."""


def _two_things(found) -> tuple[list[int], int]:
    two = isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[0], tuple | list)
    assert two, "return two things: (layers of each stage, active)"
    layers, active = list(found[0]), found[1]
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
