"""Checkers of lessons 07 and 08: bubbles, orders, memory and messages of pipelines, and a schedule of one's own."""

import math
from numbers import Integral

from ...ranks import comm
from ...schedules import Cost, Op, Schedule, ScheduleError, best_slices, make, simulate
from ...schedules import check as check_schedule
from ...schedules.terapipe import latency
from ..labs.schedules import live as trained
from . import close, live, returned, scored, sentences
from .differences import listed
from .engine import Task, by_chance, called
from .watching import Watched

OURS = "gpt2lab.schedules", "gpt2lab.lessons.exercises.pipeline"
"""Modules that know the answers."""

SIZES = ((1, 1), (2, 2), (2, 5), (4, 4), (4, 8), (3, 7), (8, 2))  # ranks, micro-batches


bubble = Task(
    lambda p, m: float(simulate(make("gpipe", p, m)).bubble),
    shown=SIZES,
    what="{} ranks, {} micro-batches",
    drawn=lambda chance: (p := chance.randint(1, 8), chance.randint(1, 8 * p)),
    closed=OURS,
)
"""Exercise: the idle share of the makespan of GPipe, from ranks and micro-batches."""


def _rank(chance) -> tuple[int, int, int]:
    p = chance.randint(1, 11)
    return chance.randrange(p), p, chance.randint(1, 13)


in_flight = Task(
    lambda rank, p, m: make("1f1b", p, m).peak(rank),
    shown=[(rank, p, m) for p, m in SIZES for rank in range(p)],
    what="rank {} of {}, {} micro-batches",
    drawn=_rank,
    closed=OURS,
)
"""Exercise: how many activations a rank of 1F1B holds at its peak."""


def order(answer) -> None:
    """Exercise: the operations of a rank in 1F1B, as pairs such as ("F", 0)."""
    for p, m in ((4, 8), *SIZES):  # the smaller ones make different orders alike
        _order_of(answer, p, m)
    by_chance(lambda chance: _order_of(answer, chance.randint(1, 9), chance.randint(1, 11)), 6)


def _order_of(answer, p: int, m: int) -> None:
    what, orders = f"{p} ranks, {m} micro-batches", []
    for rank in range(p):
        got = [tuple(listed(op)) for op in returned(called(answer, (rank, p, m), what, OURS))]
        strange = [op for op in got if len(op) != 2 or not isinstance(op[1], Integral)]
        assert not strange, f'write ("F", 0), not {strange[0]}'
        orders.append(tuple(Op(str(kind), rank, int(micro)) for kind, micro in got))
    want = make("1f1b", p, m)
    schedule = Schedule(tuple(orders), want.placement, m)
    _must_be_right(schedule, what)
    _must_be_whole(schedule)
    for rank in range(p):
        held, promised = schedule.peak(rank), want.promise[rank]
        assert held <= promised, f"{what}: rank {rank} holds {held} activations, 1F1B only {promised}"
    times = [float(simulate(one).makespan) for one in (schedule, want)]
    close(*times, f"makespan of {p} ranks, {m} micro")
    for rank, ops in enumerate(orders):
        for kind in "FB":
            micros = [op.micro for op in ops if op.kind == kind]
            assert micros == sorted(micros), (
                f"{what}: rank {rank} has {kind} of micro-batches in the order {micros}; take 0 first, then 1"
            )


def by_hand(run, serial) -> None:
    """Exercise: F and B of a pipeline, in the order of GPipe and of 1F1B.

    `run(p, m, order)` gives (loss, gradients, most held, traffic) of p live ranks with m micro-batches, `serial(m)`
    loss and gradients of one process.
    """
    for p, m, order in ((2, 4, None), (4, 8, one_f_one_b)):
        what = f"{p} ranks, {m} micro-batches" + (", in the order of 1F1B" if order else "")
        loss, want = serial(m)
        with sentences(what):
            found = run(p, m, order) if order else run(p, m)
        parts, grads, most, sent = zip(*found, strict=True)
        for rank, found in enumerate(grads):
            assert found, f"{what}: rank {rank} has no gradient at all after B"
            for name, grad in found.items():
                close(grad, want[name], f"{what}: gradient of {name} on rank {rank}")
        missing = sorted(set(want) - {name for found in grads for name in found})
        assert not missing, f"{what}: no rank has a gradient of {missing[0]}"
        assert not getattr(parts[-1], "requires_grad", False), (
            f"{what}: s.loss still holds the graphs of all micro-batches, and with them every activation: add y.item()"
        )
        close(sum(parts), loss, f"{what}: the loss, on the last rank in s.loss")
        for rank, held in enumerate(most):
            limit = min(m, p - rank) if order else m
            assert 0 < held <= limit, (
                f"{what}: s.kept of rank {rank} holds up to {held} pairs, {limit} are needed: B takes its pair out"
            )
        for rank, (calls, _, _, handles) in enumerate(sent):
            assert calls <= handles, (
                f"{what}: rank {rank} sent {calls} messages and put {handles} handles into s.leaving. comm.send waits: "
                "in 1F1B two neighbours that both send would wait for each other for ever"
            )
            right = m * ((rank > 0) + (rank < p - 1))
            assert calls == right, (
                f"{what}: rank {rank} sent {calls} messages, {right} are needed. Keep every handle: "
                "a handle that is not in s.leaving is never waited for"
            )
    more = run(2, 2, lambda *_: [("F", 0), ("F", 1), ("B", 0)])
    with sentences("2 ranks, F and B of one micro-batch"):
        less = run(2, 2, lambda *_: Watched([("F", 0), ("B", 0)]))
    for rank, ((_, early, *_), (_, grads, *_)) in enumerate(zip(more, less, strict=True)):
        assert all(bool((early[n] == g).all()) for n, g in grads.items()), (
            f"F of one more micro-batch changes the gradients of rank {rank}: backward belongs into B"
        )
    _messages_matter(run, more)


def _messages_matter(run, plain) -> None:
    """What arrives must be what is computed with; `plain` are the results of F0, F1, B0."""
    order = Watched([("F", 0), ("F", 1), ("B", 0)], loud=(("F", 1), ("B", 0)))
    loud = run(2, 2, lambda *_: order)
    for name, grad in plain[0][1].items():
        assert name == "wte.weight" or bool((loud[0][1][name] == 2 * grad).all()), (
            f"the gradient that rank 1 sends does not matter: with twice that, rank 0's gradient of {name} is not "
            "twice as large. Rank 0 runs its backward from what arrives"
        )
    assert loud[1][0] != plain[1][0], (
        "the activation that rank 0 sends does not matter: with twice that, the loss of rank 1 stays the same. "
        "Each rank runs its own stage only, from what arrives"
    )


def run_op(kind: str, i: int, s) -> None:
    """The answer to `by_hand`: ("F", i) or ("B", i) on one rank, whose state is `s`."""
    if kind == "F":
        x = comm.irecv(s.like(i), s.axis, s.rank - 1).wait().requires_grad_() if s.rank > 0 else None
        y = s.stage(x, i)
        s.kept[i] = x, y
        if s.rank < s.last:
            s.leaving.append(comm.isend(y.detach(), s.axis, s.rank + 1))
        else:
            s.loss += y.item()
    else:
        x, y = s.kept.pop(i)
        y.backward(comm.irecv(s.like(i), s.axis, s.rank + 1).wait() if s.rank < s.last else None)
        if s.rank > 0:
            s.leaving.append(comm.isend(x.grad, s.axis, s.rank - 1))


def one_f_one_b(rank: int, p: int, m: int) -> list[tuple[str, int]]:
    """The answer to `order`."""
    return [(op.kind, op.micro) for op in make("1f1b", p, m).orders[rank]]


traffic = Task(
    lambda p, m, b, T, C: (p - 1) * 2 * m * b * T * C * 4,
    shown={
        "one rank sends nothing": (1, 4, 2, 8, 16),
        "one number forward and one back between two ranks: 4 bytes each": (2, 1, 1, 1, 1),
        "4 ranks, 8 micro-batches of 2 x 16 tokens, width 64": (4, 8, 2, 16, 64),
    },
    what="{} ranks, {} micro-batches of {} x {} tokens, width {}",
    drawn=lambda chance: tuple(chance.randint(1, 9) for _ in range(5)),
)
"""Exercise: bytes that a pipeline sends in one step, all ranks together, float32."""


v_rank = Task(
    lambda stage, p: make("zb_v", p, 2 * p).placement[stage],
    shown={
        f"stage {stage} of {2 * p} on {p} ranks": (stage, p) for p in (1, 2, 3, 4) for stage in range(2 * p)
    },
    what="stage {} of twice as many as {} ranks",
    drawn=lambda chance: (chance.randrange(12), chance.randint(6, 9)),
    closed=OURS,
)
"""Exercise: which rank holds a stage where the stages go down the ranks and back up."""


def _idle(name: str, p: int, f: int, i: int, w: int) -> float:
    timeline = simulate(make(name, p, 2 * p), Cost(f, i, w))
    return float(max(timeline.span(r) - timeline.busy(r) for r in range(p)))


def _times(chance) -> list[int]:
    """Of F, I and W, which is not longer than F."""
    return [f := chance.randint(1, 6), chance.randint(1, 6), chance.randint(1, f)]


idle = Task(
    _idle,
    shown=[
        (name, *times)
        for times in ((4, 4, 5, 3), (2, 1, 1, 1), (4, 1, 1, 1), (4, 3, 4, 2), (8, 5, 5, 3), (3, 4, 1, 3))
        for name in ("1f1b", "zb_h1")
    ],
    what="{}, {} ranks, times {}, {}, {}",
    drawn=lambda chance: (chance.choice(("1f1b", "zb_h1")), chance.randint(1, 7), *_times(chance)),
    closed=OURS,
    count=8,
)
"""Exercise: idle time of a rank in 1F1B and, with split backwards, in ZB-H1."""


def _best_of_twelve() -> list[int]:
    best = best_slices(12, lambda n, context: n * (4 + context), 4)
    return [n * (4 + sum(best[:k])) for k, n in enumerate(best)]


slicing = Task(
    latency,
    shown={
        **{
            f"slices of {slices} on {ranks} ranks": (slices, ranks)
            for slices, ranks in (([4], 1), ([4], 3), ([3, 1], 2), ([2, 2, 2], 4), ([5, 4, 3, 2], 8))
        },
        "the best slices of 12 tokens on 4 ranks": (_best_of_twelve(), 4),
    },
    what="slices of {} on {} ranks",
    drawn=lambda chance: ([chance.randint(1, 9) for _ in range(chance.randint(1, 7))], chance.randint(6, 16)),
    closed=OURS,
)
"""Exercise: forward latency of token slices that take these times, on some ranks."""


ROOM, BAR, BEST = 3, 42, 39
"""The puzzle of lesson 07: activations that fit on a rank; the bar; the least that a search by chance has found."""


def squeezed(answer) -> str:
    """Exercise: four ranks and eight micro-batches (TF = 1, TB = 2) with room for three activations; a score."""
    schedule = written(answer, 4, 8)
    _must_be_right(schedule, "4 ranks, 8 micro-batches", ROOM)
    _must_be_whole(schedule)
    return scored(
        float(simulate(schedule, Cost(1, backward=2)).makespan), "units of time", bar=BAR, best=BEST
    )


RANKS, MICROS, MEMORY, COST = 4, 8, 4, Cost(1, 1, 1, hop=1)
"""The puzzle of lesson 08: ranks, micro-batches, activations that fit, and times: a message takes 1, as a forward."""


def written(answer, ranks: int, micros: int) -> Schedule:
    """The schedule of one stage a rank whose words `answer(rank)` gives."""
    orders = []
    for rank in range(ranks):
        words = returned(answer(rank))
        words = words.split() if isinstance(words, str) else list(words)
        words = ["".join(map(str, (w.kind, w.micro) if isinstance(w, Op) else listed(w))) for w in words]
        for word in words:
            assert word[:1] in "FBIW" and word[1:].isdigit(), (
                f"{word!r} is no operation. Write F0, I0, W0 or B0."
            )
        orders.append(tuple(Op(word[0], rank, int(word[1:])) for word in words))
    return Schedule(tuple(orders), tuple(range(ranks)), micros, name="own")


def design(answer) -> str:
    """Exercise: a schedule with split backwards within a memory limit, run live; the score is its time."""
    schedule = written(answer, RANKS, MICROS)
    assert all(schedule.orders), "a rank has no operations"
    _must_be_right(schedule, f"{RANKS} ranks, {MICROS} micro-batches", MEMORY)
    score = scored(float(simulate(schedule, COST).makespan), "units of time", bar=40, best=39)
    for rank, (one,) in enumerate(live(trained, [schedule], ranks=RANKS, what="your schedule, live")):
        held, *_, error, _ = one
        assert error < 1e-10, f"on live ranks a gradient of rank {rank} is off by {error:.1e}"
        assert held <= MEMORY, f"live rank {rank} held {held} activations; the limit is {MEMORY}"
    return score


def _must_be_whole(schedule: Schedule) -> None:
    split = [op for order in schedule.orders for op in order if op.kind in "IW"]
    assert not split, f"{split[0]} is half a backward. Here a backward is whole: write B"


def _must_be_right(schedule: Schedule, what: str, room: float = math.inf) -> None:
    try:
        check_schedule(schedule)
    except ScheduleError as error:
        raise AssertionError(f"{what}: {error}") from None
    for rank in range(schedule.ranks):
        held = schedule.peak(rank)
        assert held <= room, f"rank {rank} holds {held} activations at its peak; the limit is {room}"
