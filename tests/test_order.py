"""No plan's order of posting, computing and awaiting changes unnoticed: overlap and early messages stay as they are."""

import pytest
from order_of_calls import PLANS, of_a_step, shortened, written
from planting import under

from gpt2lab.parallel.context.ring import _RingAttention
from gpt2lab.parallel.data import Bucket
from gpt2lab.parallel.pipeline.mailbox import Mailbox
from gpt2lab.parallel.zero.stages import Zero3
from gpt2lab.plan import Plan


def test_the_table_has_every_plan_and_each_of_its_ranks():
    assert {plan: len(lines) for plan, lines in written().items()} == {p: Plan.parse(p).world for p in PLANS}


@pytest.mark.parametrize("plan", PLANS)
def test_calls_are_posted_and_awaited_in_the_order_of_the_table(plan, pools):
    assert pools[Plan.parse(plan).world].run(of_a_step, plan, PLANS[plan]) == written()[plan]


def test_repetitions_are_written_once_and_nothing_else_is_lost():
    assert " ".join(shortened(["a", "b", "a", "b", "a", "b", "c", "c", "d"])) == "3x( a b ) 2x( c ) d"


def at_once(right):
    """A call that its caller wants to go on beside, awaited before it does."""

    def call(self, *args):
        right(self, *args)
        self.handle.wait()

    return call


def late(right):
    """The next receive is not posted before its message is needed."""
    return lambda self, rank: None if self.posted else right(self, rank)


RING = "cp=2,exchange=ring,layout=zigzag"
START = "trip.start_next()\n"
COMPUTE = "if trip.needed:\n            state = block_forward(state, q, *trip.held, *trip.options)\n"
MUTANTS = {
    "a bucket is awaited at once": ("dp=2,bucket=1", (Bucket, "send", at_once)),
    "one receive is posted": ("pp=2,micro=3", (Mailbox, "_post", late)),
    "no block is gathered ahead": ("dp=2,zero=3", (Zero3._prefetch, "self.prefetch and", "False and")),
    "only forward gathers ahead":
        ("dp=2,zero=3", (Zero3._prefetch, "self.prefetch and", "not torch.is_grad_enabled() and")),
    "a ring computes before it passes a block on":
        (RING, (_RingAttention.forward, f"{START}        {COMPUTE}", f"{COMPUTE}        {START}")),
}  # fmt: skip


@pytest.mark.parametrize("bug", MUTANTS)
def test_mutant_with_another_order_is_noticed(bug, pools):
    """The results are the same bits: only what is under way meanwhile tells."""
    plan, bug = MUTANTS[bug]
    assert pools[2].run(under(bug, of_a_step), plan, PLANS[plan]) != written()[plan]
