"""Task graphs: edges exactly where accesses conflict, and every way of running gives the bits of program order."""

import random
import re
import threading
import time
from dataclasses import replace

import pytest
import torch
from planting import planted
from task_cases import CONFIG, SMALL, WHOLE, adamw, batch, made, model, same, sgd, worst

from gpt2lab.lessons.labs import executors
from gpt2lab.lessons.labs.tasks import audit, replay_races, sleeping
from gpt2lab.model import GPT2
from gpt2lab.ranks import comm
from gpt2lab.tasks import check
from gpt2lab.tasks.gpt2 import Blocks, GPT2Tasks
from gpt2lab.tasks.graph import TaskGraph, concurrent, reads, reduces, updates, writes
from gpt2lab.tasks.messages import Pending
from gpt2lab.tasks.runtime import TaskFailed, one_thread, run_fork_join, run_sequential
from gpt2lab.tasks.scheduler import Scheduler, run_tasks

MODES = (reads, reads, writes, updates)


def tensors():
    return {name: torch.arange(24.0).view(4, 6) for name in "abc"}


def mix(number, modes):
    """A body whose result depends on the order: what it writes follows from all that it reads and from its number."""

    def body(*views):
        seen = sum(v.sum() for v, mode in zip(views, modes, strict=True) if mode is not writes)
        for place, (view, mode) in enumerate(zip(views, modes, strict=True)):
            if mode is not reads:
                own = view * 0.5 if mode is updates else torch.zeros(())
                view.copy_((own + seen * 0.01 + number + place) % 7.3)

    return body


def random_graph(seed, tasks=30):
    draw, graph = random.Random(seed), TaskGraph(tensors())
    for number in range(tasks):
        boxes, modes = {}, []
        for name in draw.sample("abc", draw.randint(1, 3)):
            ends = [sorted(draw.sample(range(n + 1), 2)) for n in (4, 6)]
            boxes[name] = [tuple(e) for e in ends[: draw.randint(0, 2)]]
            modes.append(draw.choice(MODES))
        accesses = [mode(name, *box) for mode, (name, box) in zip(modes, boxes.items(), strict=True)]
        graph.add(f"task {number}", mix(number, modes), *accesses)
    return graph


def other_order(graph, seed):
    """Another order that the edges allow, drawn at random."""
    draw, waits, order = random.Random(seed), [len(found) for found in graph.before], []
    after = {u: [v for a, v in graph.edges() if a == u] for u in range(len(waits))}
    ready = [v for v, n in enumerate(waits) if not n]
    while ready:
        order.append(ready.pop(draw.randrange(len(ready))))
        for v in after[order[-1]]:
            waits[v] -= 1
            if not waits[v]:
                ready.append(v)
    return order


def run_in_order(graph, order):
    """All tasks in another order than the program's, which the edges must allow."""
    assert sorted(order) == list(range(len(graph.tasks)))
    assert all(order.index(u) < order.index(v) for u, v in graph.edges())
    with one_thread():
        for number in order:
            graph.tasks[number].body(*graph.tasks[number].views)


def same_bits(one, other):
    return all(torch.equal(one.tensors[n], other.tensors[n]) for n in one.tensors)


@pytest.mark.parametrize("seed", range(20))
def test_every_conflict_is_ordered_and_no_edge_can_go(seed):
    graph = random_graph(seed)
    assert check.races(graph) == [] and check.needless(graph) == []
    for u, v in graph.edges():
        fewer = [tuple(w for w in found if (w, x) != (u, v)) for x, found in enumerate(graph.before)]
        assert check.races(graph, fewer), f"without {u} -> {v} there should be a race"


@pytest.mark.parametrize("seed", range(6))
def test_any_order_that_the_edges_allow_gives_the_same_bits(seed):
    want = random_graph(seed)
    run_sequential(want)
    for other in range(3):
        graph = random_graph(seed)
        run_in_order(graph, other_order(graph, other))
        assert same_bits(graph, want)
    for workers in (1, 3):
        graph = random_graph(seed)
        spans = [s for s in run_tasks(graph, workers) if s.kind != "wait"]
        assert same_bits(graph, want) and len(spans) == 30


@pytest.mark.parametrize("seed", range(6))
def test_replay_is_the_same_as_one_iteration_after_the_other(seed):
    want, graph = random_graph(seed, 12), random_graph(seed, 12)
    for _ in range(5):
        run_sequential(want)
    scheduler = Scheduler(graph, 3)
    scheduler.run(2)
    scheduler.run(3)
    assert same_bits(graph, want)


@pytest.mark.parametrize("seed", range(6))
def test_the_edges_to_the_next_iteration_are_those_of_a_program_that_is_twice_as_long(seed):
    once, twice = random_graph(seed, 12), random_graph(seed, 12)
    for task in list(twice.tasks):
        twice.add(task.name, task.body, *task.accesses)
    both = [
        (*(u + 12 for u in inside), *before)
        for inside, before in zip(once.before, once.across(), strict=True)
    ]
    assert [set(found) for found in both] == [set(found) for found in twice.before[12:]]


def test_what_may_overlap_and_what_may_not():
    graph = TaskGraph({"x": torch.zeros(8)})
    graph.add("w", print, writes("x", (0, 4)))
    graph.add("r1", print, reads("x", (0, 2)))
    graph.add("r2", print, reads("x", (1, 6)))
    graph.add("far", print, writes("x", (6, 8)))
    graph.add("add 1", print, reduces("x", (2, 3)))
    graph.add("add 2", print, reduces("x", (2, 3)))
    graph.add("beside", print, concurrent("x", (2, 3)))
    graph.add("end", print, updates("x"))
    assert graph.before == [(), (0,), (0,), (), (2,), (2,), (5, 4), (6, 3, 1)]
    assert check.span(graph) == 5 and check.work(graph) == 8


@pytest.mark.parametrize("run", [run_fork_join, run_tasks])
def test_tasks_that_reduce_come_in_any_order_but_one_at_a_time(run):
    inside, most, graph = [], [], TaskGraph({"x": torch.zeros(3)})

    def add(x):
        inside.append(1)
        most.append(len(inside))
        torch.randn(200, 200) @ torch.randn(200, 200)
        x += 1
        inside.pop()

    for number in range(20):
        graph.add(f"add {number}", add, reduces("x"), loop="adds")
    assert not list(graph.edges())
    run(graph, 4)
    assert graph.tensors["x"].tolist() == [20] * 3 and max(most) == 1


def chain(name="b", loop=""):
    graph = TaskGraph(tensors())
    graph.add("first", lambda a: a.fill_(1), writes("a"), loop=loop)
    graph.add("then", lambda a, b: b.copy_(a), reads("a"), writes(name), loop=loop)
    return graph


def test_a_loop_whose_tasks_need_each_other_is_refused():
    with pytest.raises(ValueError, match="cannot run in parallel: 'then' needs 'first'"):
        run_fork_join(chain(loop="l"))


@pytest.mark.parametrize("run", [run_sequential, run_fork_join, run_tasks])
def test_a_task_that_raises_is_named_with_its_parts_and_its_worker(run):
    graph = chain()
    graph.add("bad", lambda b: b.view(5), updates("b", (0, 2)))
    graph.add("later", lambda b: b.fill_(9), updates("b"))
    failed = []

    def attempt():
        try:
            run(graph)
        except TaskFailed as error:
            failed.append(str(error))

    trial = threading.Thread(target=attempt, daemon=True)  # no worker may wait for one that has failed
    trial.start()
    trial.join(20)
    assert re.match(r"task 'bad' \(updates b\[0:2, 0:6\]\) on worker \d raised RuntimeError", *failed)
    assert graph.tensors["b"].eq(1).all()


class Later(comm.Handle):
    """A message that is there when it is told so."""

    def __init__(self):
        self.there = threading.Event()

    def join(self):
        self.there.wait(10)

    def announce(self, why):
        """Nobody looks."""

    def withdraw(self):
        """Nobody looks."""


def test_a_message_of_a_run_that_failed_is_none_of_the_next_run():
    graph, read, (first, second) = TaskGraph(tensors()), [], (Later(), Later())
    sent = iter((first, second))

    def other(b):
        if not second.there.is_set() and not read:
            read.append("once")
            raise RuntimeError("once")
        first.there.set()
        time.sleep(0.2)  # now the message of the first run is there, and that of this one is not
        threading.Timer(0.2, second.there.set).start()

    graph.add("receive", lambda a: Pending(next(sent)), writes("a"), wire="line")
    graph.add("other", other, updates("b"))
    graph.add("read", lambda a: read.append(second.there.is_set()), reads("a"))
    scheduler = Scheduler(graph, 1)
    with pytest.raises(TaskFailed, match="once"):
        scheduler.run()
    scheduler.run()
    assert read == ["once", True]


def test_workers_that_sleep_are_woken_when_the_last_task_is_over():
    graph = TaskGraph(tensors())
    graph.add("long", lambda a: time.sleep(0.5), updates("a"))  # the other two workers sleep by then
    trial = threading.Thread(target=Scheduler(graph, 3, patience=60).run, daemon=True)
    trial.start()
    trial.join(20)
    assert not trial.is_alive()


def test_a_graph_whose_edges_form_a_circle_ends_in_words():
    graph = chain()
    graph.before[0] = (1,)
    with pytest.raises(RuntimeError, match="rank 0 has no task to run: 'first' waits for 1 more"):
        run_tasks(graph)


def test_the_audit_sees_what_nobody_declared():
    assert audit(random_graph(3)) == []
    graph = chain()
    graph.add("scribbles", lambda b: b.add_(1), reads("b"))
    graph.add("peeks", lambda b: b.add_(graph.tensors["c"]), updates("b"))
    assert audit(graph) == [
        "'scribbles' changes b outside of what it declares to write",
        "'peeks' uses something that it does not declare to read: b becomes NaN",
    ]


def test_critical_path_and_tasks_that_sleep():
    graph = chain()
    graph.add("beside", lambda c: None, reads("c"))
    cost = {"first": 3.0, "then": 2.0, "beside": 4.0}
    of = lambda task: cost[task.name]
    assert [t.name for t in check.critical_path(graph, of)] == ["first", "then"]
    assert check.parallelism(graph, of) == 9 / 5 and check.parallelism(TaskGraph(tensors())) == 0
    slept = {s.name: s for s in run_tasks(sleeping(graph, lambda task: of(task) / 100), 2)}
    assert slept["beside"].start < slept["first"].end <= slept["then"].start
    assert slept["beside"].end - slept["beside"].start >= 0.04 and graph.before == [(), (0,), ()]


def test_the_race_finder_looks_across_iterations():
    graph = chain()
    assert replay_races(graph, graph.across()) == []
    assert replay_races(graph, [()] * 2) == [
        ("first", "first", "writes a[0:4, 0:6]"),
        ("first", "then", "reads a[0:4, 0:6]"),
        ("then", "first", "writes a[0:4, 0:6]"),
        ("then", "then", "writes b[0:4, 0:6]"),
    ]


# --- an iteration of GPT-2: equal to autograd and AdamW, the same bits however it is run


BLOCKS = [SMALL, WHOLE, Blocks(tokens=11, rows=1, heads=1, columns=0, weights=200, updates=7)]


@pytest.mark.parametrize("blocks", BLOCKS, ids=["small", "whole", "one row"])
def test_gradients_are_those_of_autograd(blocks):
    tasks, serial = made(blocks), model()
    run_sequential(tasks.graph)
    loss = serial.loss(serial(batch().tokens), batch().targets) / batch().total
    loss.backward()
    assert abs(tasks.losses[0] - loss.item()) < 1e-12 * loss.item()
    assert worst(tasks.gradients, {n: p.grad for n, p in serial.named_parameters()}) < 1e-12


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_weights_after_five_iterations_are_those_of_torch(optimizer):
    tasks, serial = made(SMALL, optimizer), model()
    run_tasks(tasks.graph, 2, 5)
    theirs, losses = optimizer(list(serial.parameters())), []
    for step in range(5):
        theirs.zero_grad()
        loss = serial.loss(serial(batch(step).tokens), batch(step).targets) / batch().total
        loss.backward()
        theirs.step()
        losses.append(loss.item())
    assert max(abs(a - b) for a, b in zip(tasks.losses, losses, strict=True)) < 1e-10
    assert worst(tasks.weights, {n: p.detach() for n, p in serial.named_parameters()}) < 1e-10


def test_every_way_of_running_gives_the_same_bits():
    want = made()
    names = sorted(s.name for s in run_sequential(want.graph))
    assert names == sorted(task.name for task in want.graph.tasks)
    runs = [lambda g: run_fork_join(g, 2), lambda g: run_fork_join(g, 3, lambda loop: "attn" in loop)]
    runs += [lambda g, w=workers: run_tasks(g, w) for workers in (1, 2, 4)]
    for run in runs:
        tasks = made()
        spans = run(tasks.graph)
        assert same(tasks, want)
        assert sorted(s.name for s in spans if s.kind != "wait") == names, "every way writes the same spans"


def test_replay_gives_the_bits_of_iterations_one_by_one():
    want, tasks = made(), made()
    for _ in range(4):
        run_sequential(want.graph)
    run_tasks(tasks.graph, 3, 4)
    assert same(tasks, want) and len(set(tasks.losses)) == 4


def test_the_latest_order_that_the_edges_allow_gives_the_same_bits():
    """Every task as late as it can be: whatever an edge is missing for has then gone wrong."""
    want, tasks = made(), made()
    run_sequential(want.graph)
    run_in_order(tasks.graph, latest(tasks.graph))
    assert same(tasks, want)


def latest(graph):
    left = [0] * len(graph.tasks)
    for u, _ in graph.edges():
        left[u] += 1
    order, ends = [], [u for u, n in enumerate(left) if not n]
    while ends:
        order.append(ends.pop(ends.index(min(ends))))
        for u in graph.before[order[-1]]:
            left[u] -= 1
            if not left[u]:
                ends.append(u)
    return order[::-1]


@pytest.mark.rotates
def test_the_graph_is_right_least_and_honest():
    tasks = made()
    assert check.races(tasks.graph) == [] and check.needless(tasks.graph) == []
    tasks = made(replace(SMALL, tokens=40, rows=4, columns=18, weights=300, updates=400))
    assert audit(tasks.graph) == []


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_tasks_and_edges_grow_with_the_blocks_of_tokens(layers):
    """A task and what orders it for every block of tokens, in every layer; what is summed over tokens is there once."""
    config = replace(CONFIG, n_layer=layers)
    for blocks in (2, 3, 8):
        graph = GPT2Tasks(GPT2(config), blocks, 4, None, Blocks(tokens=4, rows=1)).graph
        # gradients: linear layers and norms of a layer; head, last norm, embeddings
        weights = layers * (4 + 2) + 4
        updated = layers * (4 + 1) + 3  # matrices and vectors of a layer; embeddings, last norm
        assert len(graph.tasks) == layers * 14 * blocks + 6 * blocks + 2 + weights + updated
        assert len(list(graph.edges())) == (25 * layers + 12) * blocks + 10 * layers + 4


@pytest.mark.rotates
@pytest.mark.parametrize("elements", [0, 7, 100, 1000])
def test_blocks_of_the_update_change_no_bit(elements):
    want, tasks = made(), made(replace(SMALL, updates=elements))
    for _ in range(2):
        run_sequential(want.graph)
        run_tasks(tasks.graph, 2)
    assert same(tasks, want)


def test_smaller_blocks_mean_more_tasks_and_more_parallelism():
    whole, small = made(WHOLE).graph, made(SMALL).graph
    assert len(whole.tasks) < 120 < len(small.tasks)
    assert check.parallelism(small) > 1.5 * check.parallelism(whole)


def test_executors_leave_the_same_bits_and_one_that_forgets_a_block_is_found():
    found = executors.executors([30, 100], 100)
    assert len(found) == 5 and all(len(took) == 2 and min(took) > 0 for took in found.values())
    forgets = lambda right: lambda graph: [task.body(*task.views) for task in graph.tasks[:-1]]
    with (
        planted(executors, "run_sequential", forgets),
        pytest.raises(RuntimeError, match="blocks of 30: other bits"),
    ):
        executors.executors([30], 100)
