"""Checkers of lesson 15: places, groups, who gets the fast links, who sends what to another plan, the norm."""

import itertools
import math
from types import MappingProxyType

import torch

from ...machine.links import Link
from ..labs.meshes import slow_bytes
from . import Puzzle, Task, by_chance, close, returned, sentences, unaided, without_frames

MESHES = (
    {"dp": 2, "tp": 2},
    {"pp": 2, "dp": 3, "tp": 2},
    {"pp": 2, "cp": 2, "tp": 3},
    {"tp": 2, "pp": 3, "dp": 2},
)


def _place(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    place = {}
    for axis, size in reversed(sizes.items()):
        rank, place[axis] = divmod(rank, size)
    return {axis: place[axis] for axis in sizes}


def coordinates(answer) -> None:
    """Exercise: a rank's place on every axis; the sizes name the axes from the outermost to the innermost."""
    for sizes in MESHES:
        for rank in range(math.prod(sizes.values())):
            want, got = _place(rank, sizes), answer(rank, dict(sizes))
            returned(got)
            assert set(got) == set(sizes), f"{sizes}: expected a place on {list(sizes)}, got {got}"
            for axis, place in got.items():
                assert 0 <= place < sizes[axis], (
                    f"{sizes}: rank {rank} cannot stand at {axis}={place}, there are only {sizes[axis]} places"
                )
            inner = list(sizes)[-1]
            assert rank != 1 or got[inner] == 1, (
                f"{sizes}: rank 1 is rank 0's neighbour along the last axis, {inner}; yours is {got}"
            )
            assert got == want, f"{sizes}: rank {rank} stands at {want}, not {got}"


def groups(answer) -> None:
    """Exercise: all groups of one axis, each a tuple of ranks."""
    for sizes in MESHES:
        world = math.prod(sizes.values())
        for axis in sizes:
            got = returned(answer(axis, dict(sizes)))
            backwards = [g for g in got if isinstance(g, list | tuple) and list(g) != sorted(g)]
            assert not backwards, (
                f"{axis} of {sizes}: {backwards[0]} is a group, but a rank's position in it is its place on {axis}: "
                "the first rank stands first"
            )
            got = sorted(tuple(sorted(group)) for group in got)
            for a, b in ((a, b) for group in got for a, b in itertools.pairwise(group)):
                here, there = _place(a, sizes), _place(b, sizes)
                differ = [name for name in sizes if here[name] != there[name] and name != axis]
                assert not differ, (
                    f"{axis} of {sizes}: ranks {a} and {b} share a group, but they differ in {differ[0]}"
                )
            members = sorted(rank for group in got for rank in group)
            lost = sorted(set(range(world)) - set(members))
            assert not lost, f"{axis} of {sizes}: rank {lost[0]} is in no group"
            assert len(members) == world, f"{axis} of {sizes}: some rank is in two groups, {got}"
            assert all(len(group) == sizes[axis] for group in got), (
                f"{axis} of {sizes}: groups have {sizes[axis]} ranks, yours are {got}"
            )


CASES = (  # what one rank sends a step: (messages, bytes)
    ({"dp": (40, 4e7), "tp": (2, 1e5)}, Link(1e-5, 1e9), Link(1e-3, 1e8)),
    ({"dp": (2, 4e6), "tp": (40, 2e6)}, Link(1e-5, 1e9), Link(1e-3, 1e8)),
    ({"dp": (2, 9e6), "tp": (40, 2e6)}, Link(1e-5, 1e9), Link(1e-4, 1e8)),
    ({"cp": (8, 3e6), "tp": (20, 1e6)}, Link(1e-5, 1e8), Link(1e-3, 1e8)),
)


def placement(answer) -> None:
    """Exercise: which axis gets the links inside a node, the other one those between nodes."""
    for sent, inside, between in CASES:
        _placed_well(answer, sent, inside, between)
    by_chance(lambda chance: _placed_well(answer, *_links(chance)))


def _links(chance):
    """Two axes and two kinds of links, of which both latencies and both bandwidths matter."""
    sent = {
        axis: (chance.randint(1, 40), 1e5 * chance.randint(1, 99))
        for axis in chance.sample(("dp", "tp", "cp"), 2)
    }
    inside = Link(1e-3 * chance.randint(0, 9), 1e8 * chance.randint(1, 9))
    between = Link(inside.latency + 1e-4 * chance.randint(0, 5), inside.bandwidth / chance.randint(1, 5))
    totals = [_total(sent, axis, inside, between) for axis in sent]
    return (sent, inside, between) if max(totals) > 1.01 * min(totals) else _links(chance)


def _placed_well(answer, sent, inside: Link, between: Link) -> None:
    total = {a: _total(sent, a, inside, between) for a in sent}
    best, got = min(total, key=total.get), answer(dict(sent), inside, between)
    returned(got)
    assert got in sent, f"expected one of {list(sent)}, got {got!r}"
    if got == best:
        return
    cost = {a: f"{1e3 * t:.0f} ms with {a} inside" for a, t in total.items()}
    said = f"{sent}: the links cost {cost[got]}, {cost[best]}"
    alike = inside.bandwidth == between.bandwidth
    if alike and between.time(*sent[got][::-1]) > between.time(*sent[best][::-1]):
        raise AssertionError(f"{said}. Bytes pass equally fast here and there: what an axis gains counts")
    most = {i: max(sent, key=lambda a: sent[a][i]) for i in (0, 1)}
    if got == most[1]:
        raise AssertionError(f"{said}. {got} sends more bytes, but every message pays its latency too")
    if got == most[0]:
        raise AssertionError(f"{said}. {got} sends more messages, but bytes take time too")
    raise AssertionError(f"{said}. What counts is seconds saved, not how many times faster an axis becomes")


def _total(sent, inner, inside: Link, between: Link) -> float:
    """Seconds of all messages with one axis inside."""
    return sum((inside if a == inner else between).time(size, count) for a, (count, size) in sent.items())


def norm(answer) -> None:
    """Exercise: the norm of the whole gradient from this rank's pieces and their specs."""
    from ... import Ranks
    from ...reference import CONFIG, example_batch, example_weights

    given = CONFIG, example_batch(CONFIG, 7, 11), example_weights(CONFIG)
    plans = ("dp=2,tp=2", "pp=2,tp=2,micro=2")
    with Ranks(4, echo=False, timeout=10) as ranks, sentences():
        answers = {plan: ranks.run(without_frames(_norms), answer, plan, *given) for plan in plans}
    for plan, found in answers.items():
        values = [value for value, *_ in found]
        assert None not in values, "your function returned None. Is the return missing?"
        _, sent, changed, right, everything, tied = found[0]
        off = lambda other: abs(values[0] - other) < 1e-9 * other  # noqa: B023
        assert max(values) - min(values) < 1e-9 * right, (
            f"{plan}: the ranks disagree, {[round(v, 3) for v in values]}: they hold different parts, so sum over them"
        )
        assert not off(everything), (
            f"{plan}: {values[0]:.4f} instead of {right:.4f}. Every replica counted; a replica counts on one rank only"
        )
        assert plan.startswith("dp") or not off(tied), (
            f"{plan}: {values[0]:.4f} instead of {right:.4f}. The embedding lives on the first and on the last stage"
        )
        assert not off(right**2), f"{plan}: this is the square of the norm. Is the root missing?"
        close(values[0], right, f"{plan}: the norm")
        assert not changed, f"{plan}: right, but your function changes the gradients, which the update needs"
        assert sent <= 400, (
            f"{plan}: right, but a rank sent {sent:,} bytes. Each rank can square its own; one number need travel"
        )


def _norms(rank, world_size, answer, text, config, batch, start):
    """(the answer, bytes sent for it, whether gradients changed, the right norm, two wrong ones) on one rank.

    Of the wrong norms one counts every replica, the other the tied copy.
    """
    from ...plan import Plan, build
    from ...ranks import comm
    from ...ranks.mesh import Mesh
    from ...train import Trainer

    plan = Plan.parse(text)
    parallel = build(plan, config, Mesh(**plan.axes), torch.float64)
    parallel.load(start)
    trainer, mesh, held = Trainer(parallel), parallel.mesh, parallel.sync.pieces
    right = trainer.gradients(batch)[1]
    squares = lambda chosen: sum(
        (p.tensor.grad.pow(2).sum() for p in chosen), torch.zeros((), dtype=torch.float64)
    )
    place = mesh.coordinates()
    first = [p for p in held if all(place[a] == 0 or a in p.spec.axes for a in ("dp", "tp"))]
    own = squares(held).item()
    both = [comm.all_reduce(squares(chosen), mesh.world).sqrt().item() for chosen in (held, first)]
    comm.clear_log()
    value = unaided(answer, __name__, "gpt2lab.train")(held, mesh)
    sent, changed = sum(e.bytes for e in comm.log), squares(held).item() != own
    return None if value is None else float(value), sent, changed, right, *both


SIZES = MappingProxyType({"pp": 2, "dp": 3, "cp": 2, "tp": 4})


def _no_order(found) -> dict:
    if not isinstance(found, list | tuple):
        return {f"a list of four names, outermost first; not {found!r}": True}
    count = {axis: list(found).count(axis) for axis in SIZES}
    return {
        **{f"there is no axis {axis!r}. There are {', '.join(SIZES)}": axis not in SIZES for axis in found},
        **{
            f"{axis} is missing: every axis has its place, also the small ones": not count[axis]
            for axis in SIZES
        },
        **{f"{axis} stands there {count[axis]} times": count[axis] > 1 for axis in SIZES},
    }


axes = Puzzle(
    lambda found: slow_bytes(found, SIZES, {"pp": 20, "dp": 500, "cp": 300, "tp": 600}, 8),
    "MB between nodes",
    bar=30_560,
    best=24_960,
    rules=_no_order,
)
"""Puzzle: the order of four axes on six nodes of 8 ranks; the score is megabytes between nodes."""


def _stretches(chance) -> tuple:
    """What some ranks have of a vector, all of it together, and what they want."""
    ranks, length = chance.randint(1, 6), chance.randint(6, 20)
    ends = [0, *sorted(chance.sample(range(1, length), chance.randint(0, min(ranks, 5) - 1))), length]
    parts = list(itertools.pairwise(ends))
    have = parts + chance.choices(parts, k=ranks - len(parts))
    return chance.sample(have, ranks), [
        tuple(sorted(chance.sample(range(length + 1), 2))) for _ in range(ranks)
    ]


def _messages_of(found, have, want):
    """What is wrong with messages (from, to, start, stop), for the first number of the vector where something is."""
    for source, to, start, stop in found:
        words = f"{start} to {stop - 1} from rank {source} to rank {to}"
        yield f"{words}: it is sent to itself", source == to
        yield (
            f"{words}: rank {source} does not have that",
            not have[source][0] <= start < stop <= have[source][1],
        )
        yield f"{words}: rank {to} does not want all that", not want[to][0] <= start < stop <= want[to][1]
    for to, (first, last) in enumerate(want):
        for i in range(first, last):
            times = sum(there == to and start <= i < stop for _, there, start, stop in found)
            mine = have[to][0] <= i < have[to][1]
            yield f"rank {to} is sent number {i}, and has it already", mine and times
            yield f"rank {to} never gets number {i}", not mine and not times
            yield f"rank {to} gets number {i} {times} times", times > 1


messages = Task(
    None,
    (
        ([(0, 6), (6, 12), (0, 6), (6, 12)], [(0, 3), (3, 6), (6, 9), (9, 12)]),
        ([(0, 3), (3, 6), (6, 9), (9, 12)], [(0, 12), (0, 6), (6, 12), (2, 7)]),
    ),
    what="have {0}, want {1}",
    drawn=_stretches,
    rules=lambda found, *given: dict(_messages_of([tuple(map(int, one)) for one in found], *given)),
)
