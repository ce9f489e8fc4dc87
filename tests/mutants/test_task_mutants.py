"""Bugs in task graphs, their runtimes and GPT-2's tasks: each is noticed by a check that the other tests rely on."""

import time
from functools import partial

import pytest
import test_tasks as tasks
import torch
from planting import bugs, is_killed, passes, planting, under
from task_cases import SMALL, WHOLE, made, worst
from test_tasks_live import serial, train

from gpt2lab.algorithms import kernels
from gpt2lab.lessons.labs.tasks import audit
from gpt2lab.ranks.call import Handle
from gpt2lab.tasks import graph, scheduler
from gpt2lab.tasks.gpt2 import GPT2Tasks
from gpt2lab.tasks.graph import Access, TaskGraph, reads
from gpt2lab.tasks.messages import Pending
from gpt2lab.tasks.runtime import run_fork_join
from gpt2lab.tasks.scheduler import Scheduler, run_tasks

pytestmark = pytest.mark.mutant


def honest():
    """Every task of GPT-2 declares what it touches."""
    assert audit(made(WHOLE).graph) == []


def peeks(right):
    """The residual stream is taken from where it lies instead of being declared."""

    def add(self, loop, body, *accesses, **options):
        if loop.startswith("attn.c_proj"):
            *inputs, residual, out = accesses
            hidden = lambda x, w, b, y: body(x, w, b, residual.part(self.graph.tensors[residual.tensor]), y)
            return right(self, loop, hidden, *inputs, out, **options)
        return right(self, loop, body, *accesses, **options)

    return add


GRADIENTS = tasks.test_gradients_are_those_of_autograd, SMALL
GRAPH, LATEST = (
    tasks.test_the_graph_is_right_least_and_honest,
    tasks.test_the_latest_order_that_the_edges_allow_gives_the_same_bits,
)
ORDERED = tasks.test_every_conflict_is_ordered_and_no_edge_can_go, 0
ANY_ORDER = tasks.test_any_order_that_the_edges_allow_gives_the_same_bits, 0
ACROSS = tasks.test_the_edges_to_the_next_iteration_are_those_of_a_program_that_is_twice_as_long, 0
BUGS = {
    "an access that nobody declared": (GPT2Tasks, "_add", peeks, honest),
    "reads where it updates": (GPT2Tasks._forward, 'updates("logits", b)', 'reads("logits", b)', honest),
    "reads where it writes": (GPT2Tasks._attention, 'writes(f"y.{i}"', 'reads(f"y.{i}"', honest),
    "writes where it updates":
        (GPT2Tasks._backward, 'updates("d.wte.weight", rows)', 'writes("d.wte.weight", rows)', honest),
    "a task waits only for the last that it needs":
        (TaskGraph._append, "tuple(kept)", "tuple(kept[:1])", GRAPH),
    "a task waits only for the last, run as late as can be":
        (TaskGraph._append, "tuple(kept)", "tuple(kept[:1])", LATEST),
    "an edge too many":
        (TaskGraph._append, "tuple(kept)", "tuple(dict.fromkeys([*kept, *range(number)[-1:]]))", GRAPH),
    "parts that touch at one row do not overlap":
        (Access.overlaps, "a[0] < b[1] and b[0] < a[1]", "a[0] + 1 < b[1] and b[0] + 1 < a[1]", ANY_ORDER),
    "writers do not wait for readers":
        (Access.conflicts, "and self.overlaps(other)", "and self.overlaps(other) and other.mode != 'reads'",
         ANY_ORDER),
    "a writer forgets earlier readers": (Access.covers, "return all", "return True or all", ORDERED),
    "no edges to the next iteration": (TaskGraph.across, "if u < n)", "if u < 0)", ACROSS),
    "an iteration waits for the one before the last":
        (TaskGraph.across, "if u < n)", "if u < n)[1:]", ACROSS),
    "gradient past the residual lost":
        (kernels.layer_norm_backward, "if residual is not None:", "if False:", GRADIENTS),
    "slope of the gelu lost": (kernels.gelu_backward, "dbefore.mul_(slope)", "pass", GRADIENTS),
    "sum of losses, not mean, in one place": (kernels.head_backward, "alpha=scale", "alpha=1.0", GRADIENTS),
    "tied embedding has the head's gradient only":
        (kernels.embed_backward, "dwte.index_add_(0, tokens[rows] - first, dx[rows])", "pass", GRADIENTS),
}  # fmt: skip


@bugs(BUGS)
def test_a_wrong_graph_or_kernel_is_noticed(bug, check):
    assert is_killed(bug, check), "nobody noticed"


def late():
    """A message takes 0.1 s; a task reads what it brings."""
    slow = Handle(None)
    slow.announce = slow.withdraw = lambda *_: None
    slow.join = lambda: time.sleep(0.1) or torch.ones(3)
    found, two = [], TaskGraph({"x": torch.zeros(3)})
    two.add("receive", lambda x: Pending(slow, x.copy_), graph.writes("x"), wire="w", kind="comm")
    two.add("use", lambda x: found.append(x.tolist()), reads("x"))
    run_tasks(two, 2)
    assert found == [[1.0] * 3]


ONE_AT_A_TIME = tasks.test_tasks_that_reduce_come_in_any_order_but_one_at_a_time
RUNTIMES = {
    "two tasks reduce at once":
        (Scheduler._pop, "if taken is None:", "if True:",
         partial(ONE_AT_A_TIME, run_tasks)),
    "two tasks of a loop reduce at once":
        (run_fork_join, "held.enter_context(alone[tensor])", "pass",
         partial(ONE_AT_A_TIME, run_fork_join)),
    "a handle completed early":
        (Scheduler._execute, "self._busy -= 1", "self._busy -= 1; self._satisfy(self._after[task.number])",
         late),
    "a task of the next iteration waits for one too few":
        (scheduler._edges, "on_start, first, again", "on_start, first, [max(0, n - 1) for n in again]",
         tasks.test_replay_gives_the_bits_of_iterations_one_by_one),
}  # fmt: skip


@bugs(RUNTIMES)
def test_a_wrong_runtime_is_noticed(bug, check):
    """In one of twelve runs: workers race."""
    check()
    with planting(bug):
        assert not all(passes(check) for _ in range(12)), "nobody noticed"


SLICES = {
    "gradients of lent keys are not added": (kernels.add, "total.add_(part)", "pass"),
    "queries and keys are sent": (GPT2Tasks._attention, "(c, 3 * c)", "(0, 2 * c)"),
    "every slice begins at position 0":
        (kernels.positions_backward, "[first : first + len(part)]", "[: len(part)]"),
}  # fmt: skip


@pytest.mark.parametrize("name", [None, *SLICES])
def test_a_wrong_slice_is_noticed(name, pools):
    """Weights after an iteration on a slice of every sequence."""
    found = pools[2].run(under(SLICES.get(name), train), "tasks", True, 1)
    error = max(worst(weights, serial(1).weights) for _, weights, *_ in found)
    assert error < 1e-10 if name is None else error > 1e-3, f"{name}: {error}"
