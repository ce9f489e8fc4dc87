"""GPT-2's iteration as tasks: equal to autograd and AdamW, the same bits however it is run."""

from dataclasses import replace

import pytest
from planting import planted
from task_cases import CONFIG, SMALL, WHOLE, adamw, batch, made, model, same, sgd, worst

from gpt2lab.lessons.labs import executors
from gpt2lab.lessons.labs.tasks import audit
from gpt2lab.model import GPT2
from gpt2lab.tasks import check
from gpt2lab.tasks.gpt2 import Blocks, GPT2Tasks
from gpt2lab.tasks.runtime import run_fork_join, run_sequential
from gpt2lab.tasks.scheduler import run_tasks

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
    run_sequential(tasks.graph, latest(tasks.graph))
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
        weights = (
            layers * (4 + 2) + 4
        )  # gradients: linear layers and norms of a layer; head, last norm, embeddings
        updated = layers * (4 + 1) + 3  # matrices and vectors of a layer; embeddings, last norm
        assert len(graph.tasks) == layers * 14 * blocks + 6 * blocks + 2 + weights + updated
        assert len(list(graph.edges())) == (25 * layers + 12) * blocks + 10 * layers + 4


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
    forgets = lambda right: lambda graph: right(graph, range(len(graph.tasks) - 1))
    with (
        planted(executors, "run_sequential", forgets),
        pytest.raises(RuntimeError, match="blocks of 30: other bits"),
    ):
        executors.executors([30], 100)
