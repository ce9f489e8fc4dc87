"""Checkers of lesson 13: declared accesses, edges that could go, the ready rule, messages, blocks of work."""

import heapq
import random
from dataclasses import asdict
from functools import partial
from itertools import pairwise

import torch

from ...processes.launch import Ranks
from ...ranks import comm
from ...ranks.mesh import Mesh
from ...tasks import check, messages
from ...tasks.gpt2 import Blocks
from ...tasks.graph import Access, TaskGraph, reads, reduces, updates, writes
from ...tasks.scheduler import run_tasks
from ..environment import YOUR_TURN
from ..labs.tasks import audit, elements_of, one_layer
from . import Puzzle, Task, by_chance, returned, run_there, spoken, unaided, without_frames
from .differences import listed
from .watching import Counted

BODIES = {
    "up": lambda x, w, h: h.copy_(x @ w),
    "gelu": lambda h: h.mul_(torch.sigmoid(1.702 * h)),
    "down": lambda x, h, w, y: y.copy_(x + h @ w),
    "grad": lambda h, y, d: d.add_(h.t() @ y),
}


BLOCKS = ((0, 2), (2, 4), (4, 6))


def mlp(declare, blocks=BLOCKS) -> TaskGraph:
    """The tasks of an MLP over blocks of its six tokens, with the accesses that `declare(task, a, b)` gives."""
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    tensors = {"x": draw(6, 3), "w1": draw(3, 4), "w2": draw(4, 3), "h": draw(6, 4), "y": draw(6, 3)}
    graph = TaskGraph(tensors | {"d": torch.zeros(4, 3)})
    for task, body in BODIES.items():
        for a, b in blocks:
            accesses = listed(returned(declare(task, a, b), task))
            assert isinstance(accesses, list) and all(isinstance(access, Access) for access in accesses), (
                f"{task}: give a tuple of accesses such as reads('x', (a, b)), not {accesses!r}"
            )
            graph.add(f"{task} {a}:{b}", body, *accesses)
    return graph


def declared(task: str, a: int, b: int) -> tuple[Access, ...]:
    """The answer to `declare`."""
    block = (a, b)
    return {
        "up": (reads("x", block), reads("w1"), writes("h", block)),
        "gelu": (updates("h", block),),
        "down": (reads("x", block), reads("h", block), reads("w2"), writes("y", block)),
        "grad": (reads("h", block), reads("y", block), reduces("d")),
    }[task]


def declare(answer) -> None:
    """Exercise: what the tasks of an MLP touch, no less and no more."""
    for blocks in (BLOCKS, ((0, 1), (1, 4), (4, 6))):
        _declared_right(mlp(answer, blocks), mlp(declared, blocks))
    mlp(unaided(answer, __name__))
    by_chance(partial(_declared_by_chance, answer), 3)


def _declared_by_chance(answer, chance) -> None:
    cuts = [0, *sorted(chance.sample(range(1, 6), chance.randint(0, 4))), 6]
    _declared_right(mlp(answer, tuple(pairwise(cuts))), mlp(declared, tuple(pairwise(cuts))))


def _declared_right(graph, want) -> None:
    together = [(t.name, a.tensor) for t in graph.tasks for a in t.accesses if a.mode == "concurrent"]
    assert not together, (
        f"{together[0][0]!r} adds to {together[0][1]} while others do: two at the same time lose a sum. One at a time"
    )
    try:
        found = audit(graph)
    except (RuntimeError, TypeError) as error:
        raise AssertionError(f"a task cannot compute with the parts that it declares: {error}") from None
    assert not found, f"{found[0]}"
    for task, right in zip(graph.tasks, want.tasks, strict=True):
        more = sorted(set(graph.before[task.number]) - set(want.before[right.number]))
        assert not more, (
            f"{task.name!r} has to wait for {graph.tasks[more[0]].name!r}, and need not: something is too large"
        )
    for task, right in zip(graph.tasks, want.tasks, strict=True):
        more = [a.tensor for a in task.accesses if a.mode == "updates" and a not in right.accesses]
        assert not more, f"{task.name!r} says updates of {more[0]}, and does not both read and write it"
    missing = [v for v in range(len(want.tasks)) if set(want.before[v]) - set(graph.before[v])]
    assert not missing, f"nothing orders {graph.tasks[missing[0]].name!r} after what it needs"


def random_edges(seed: int, tasks: int = 12, most: int = 4) -> list[tuple[int, ...]]:
    """Edges to each task from some tasks before it, many of them implied by others."""
    draw = random.Random(seed)
    return [tuple(sorted(draw.sample(range(v), min(v, draw.randint(0, most))))) for v in range(tasks)]


def reduced(before: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The answer to `fewest`."""
    ancestors = check.ancestors_of(before)
    implied = lambda u, firsts: any(ancestors[w] >> u & 1 for w in firsts if w != u)
    return [tuple(u for u in firsts if not implied(u, firsts)) for firsts in before]


def _long_ways(chance) -> list[tuple[int, ...]]:
    """A chain of tasks, and edges that jump over some of its links."""
    jumps = lambda v: chance.sample(range(v - 1), min(v - 1, chance.randint(0, 2))) if v > 1 else []
    return [tuple(sorted({*jumps(v), v - 1})) if v else () for v in range(chance.randint(1, 12))]


fewest = Task(
    lambda before: [sorted(firsts) for firsts in reduced(before)],
    shown=[([(), (0,), (0, 1)],), ([(), (0,), (1,), (2, 0)],), *((random_edges(n),) for n in range(8))],
    what="what stands before each task: {}",
    drawn=lambda chance: (_long_ways(chance),),
    like=lambda got, words: [sorted(firsts) for firsts in got],
    closed=(__name__, "gpt2lab.tasks"),
)
"""Exercise: the fewest edges that order the same tasks."""


def release(v: int, waits: list[int], after: list[list[int]]) -> list[int]:
    """The answer to `ready`."""
    found = []
    for w in after[v]:
        waits[w] -= 1
        if waits[w] == 0:
            found.append(w)
    return found


def ready(answer) -> None:
    """Exercise: the tasks that may run because one is over."""
    for seed in range(6):
        _all_run(answer, random_edges(seed, 40), seed % 2 - 1)
    by_chance(
        lambda chance: _all_run(answer, random_edges(chance.randrange(99), chance.randint(20, 39)), -1), 3
    )


def _all_run(answer, before: list[tuple[int, ...]], place: int) -> None:
    after, over = [[w for w, firsts in enumerate(before) if v in firsts] for v in range(len(before))], []
    for v, looked, same in run_there(_let_go, answer, before, after, place):
        early = [u for u in before[v] if u not in over]
        assert not early, f"task {v} was let go while task {early[0]}, which it needs, was not over"
        assert v not in over, f"task {v} was let go twice"
        over.append(v)
        assert same, "your function takes tasks out of after[v]; count in `waits` alone"
        assert looked <= 4 * len(after[v]) + 4, (
            f"you looked at {looked} counters for a task that {len(after[v])} wait for; with a million tasks "
            "that is the whole time. Look at after[v] alone"
        )
    left = sorted(set(range(len(before))) - set(over))
    assert not left, f"task {left[0]} never runs, though all that it waits for is over"


def _let_go(answer, before: list, after: list, place: int) -> list[tuple[int, int, bool]]:
    """Tasks as they are over, until one goes wrong: (task, counters looked at, whether after[v] is the same)."""
    waits, log = Counted(len(firsts) for firsts in before), []
    queue, over = [v for v, firsts in enumerate(before) if not firsts], set()
    while queue:
        v = queue.pop(place)
        if v in over or not over.issuperset(before[v]):
            return [*log, (v, 0, True)]
        over.add(v)
        waits.looked, behind = 0, list(after[v])
        queue += returned(unaided(answer, __name__)(v, waits, after))
        log.append((v, waits.looked, after[v] == behind))
        if not log[-1][2] or waits.looked > 4 * len(behind) + 4:
            return log
    return log


def received(axis, source: int):
    """The answer to `gives_back`."""
    return lambda x: messages.Pending(comm.irecv(x, axis, source), x.copy_)


def question_and_answer(rank: int, world_size: int, make, other: int, *numbers: float) -> list[float]:
    """Rank 0 with one worker waits for rank `other`'s answer to a question that it still has to ask: some numbers."""
    axis = Mesh(dp=world_size)["dp"]
    graph = TaskGraph({"x": torch.full((len(numbers),), 5.0), "q": torch.tensor(numbers)})
    if rank == 0:
        body = unaided(make, __name__, "gpt2lab.tasks.messages.receive")(axis, other)
        assert callable(body), "`received(axis, source)` must return the body, a function of the view x"
        body = unaided(body, __name__)
        graph.add("receive", body, writes("x"), wire=f"from {other}", priority=1)
        messages.send(graph, "ask", axis, other, "q")
        graph.add("use", lambda x: x.add_(1), updates("x"))
    elif rank == other:
        messages.receive(graph, "question", axis, 0, "q")
        graph.add("think", lambda q: q.mul_(2), updates("q"))
        messages.send(graph, "answer", axis, 0, "q")
    run_tasks(graph, 1, patience=3)
    return graph.tensors["x"].tolist()


def gives_back(answer) -> None:
    """Exercise: the body of a task that receives, and gives its core back while the message is under way."""
    with Ranks(3, echo=False, timeout=10) as ranks:
        _gives_back(ranks, answer, 1, 20.0, 1.5)
        by_chance(lambda chance: _gives_back(ranks, answer, 2, *map(float, chance.sample(range(9), 3))), 1)


def _gives_back(ranks, answer, other: int, *numbers: float) -> None:
    try:
        got, *_ = ranks.run(without_frames(question_and_answer), answer, other, *numbers)
    except RuntimeError as error:
        text = str(error)
        if YOUR_TURN in text:
            raise NotImplementedError(YOUR_TURN) from None
        assert "0 -> 1 -> 0" not in text and "'question'" not in text, (
            "the worker of rank 0 sleeps in your task, so nobody asks the question that the answer is for: "
            "start the message and return a Pending"
        )
        assert "Nothing has moved" not in text, (
            f"nobody receives what rank {other}, the source, sends to rank 0"
        )
        raise AssertionError(spoken(error)) from None
    assert set(got) != {6.0}, (
        "the task is over, but what came is not in x: let Pending put it there on arrival"
    )
    right = [2 * number + 1 for number in numbers]
    assert got == right, (
        f"rank 0 should end with {right} (twice {[*numbers]}, and one), not {got}: what comes takes the place of what "
        "x held"
    )


WORKERS, RUNTIME, BAR, BEST = 3, 4, 1_100, 1_078
"""The puzzle: workers, what the runtime takes for a task, the bar, the least that random searches have found."""

LEAST = Blocks(tokens=8, rows=1, heads=1, columns=8, weights=256, updates=256)


def _too_small(blocks) -> dict:
    assert isinstance(blocks, Blocks), f"return Blocks(tokens=..., rows=..., ...), not {blocks!r}"
    least = asdict(LEAST)
    return {
        f"{name}={size} makes too many tasks: use {least[name]} or more, or 0 for all in one piece": (
            0 < size < least[name]
        )
        for name, size in asdict(blocks).items()
    }


cut = Puzzle(
    lambda blocks: time_of(one_layer(4, 16, blocks)), "units of time", bar=BAR, best=BEST, rules=_too_small
)
"""Puzzle: blocks that make an iteration on three workers short, where every task has its price."""


def time_of(graph: TaskGraph) -> int:
    """When three workers are through, who take what begins the longest chain; a task takes a unit for 128 elements."""
    cost = lambda task: RUNTIME + -(-elements_of(task) // 128)
    longest = check.levels(graph, cost)
    order = sorted(range(len(longest)), key=lambda v: -longest[v])
    return makespan(order, [cost(task) for task in graph.tasks], graph.before)


def makespan(order, times, before, workers: int = WORKERS) -> int:
    """When all tasks are over if a worker that is free takes the first ready task of `order`, and never waits for a
    better one.
    """
    place, waits = {v: i for i, v in enumerate(order)}, [len(firsts) for firsts in before]
    after = [[w for w, firsts in enumerate(before) if v in firsts] for v in range(len(times))]
    ready, running, now = sorted(place[v] for v, n in enumerate(waits) if not n), [], 0
    while ready or running:
        while ready and len(running) < workers:
            v = order[heapq.heappop(ready)]
            heapq.heappush(running, (now + times[v], v))
        now = running[0][0]
        while running and running[0][0] == now:
            for w in release(heapq.heappop(running)[1], waits, after):
                heapq.heappush(ready, place[w])
    return now
