"""Bugs in mixtures of experts, planted on the ranks: verification notices each of them."""

import contextlib
from dataclasses import replace

import pytest
import test_experts as serial
import torch
from planting import is_noticed

from gpt2lab.experts import mixture, rows
from gpt2lab.parallel import data, expert, finish, sequence, spec
from gpt2lab.processes.launch import Ranks
from gpt2lab.ranks.mesh import Axis
from gpt2lab.reference import EXPERTS

SMALL = replace(EXPERTS, n_layer=2, experts=replace(EXPERTS.experts, balance=0.1, capacity=1.0))
BIASED = replace(SMALL, experts=replace(SMALL.experts, router="deepseek", speed=0.05))
BY_BATCH = replace(SMALL, experts=replace(SMALL.experts, group="batch"))


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, echo=False, timeout=120) as pool:
        yield pool


def weights_forgotten(right):
    def backward(ctx, grad):
        of_rows, of_weights, *none = right(ctx, grad)
        return grad.index_select(0, ctx.saved_tensors[2]), of_weights, *none

    return backward


def router_gradient_lost(right):
    def backward(ctx, grad):
        of_rows, of_weights, *none = right(ctx, grad)
        return of_rows, torch.zeros_like(of_weights), *none

    return backward


def first_expert_only(right):
    """A token's gradient is overwritten by that of its last expert, not added to."""

    def backward(ctx, grad):
        token = ctx.saved_tensors[0]
        return grad.new_zeros(ctx.length, grad.size(1)).index_copy_(0, token, grad), None

    return backward


def loss_of_the_rank_averaged(right):
    def losses(self, *given):
        self.total, kept = given[1][..., 0].numel(), self.total
        try:
            return right(self, *given)
        finally:
            self.total = kept

    return losses


def room_off_by_one(right):
    return lambda self, tokens: right(self, tokens) + 1


def second_choices_first(right):
    def room(self, experts):
        kept, share = right(self, experts.flip(-1))
        return kept.flip(-1), share

    return room


def loss_left_out(right):
    return lambda self, *given: right(self, *given) * 0


def not_divided(right):
    return lambda self, *given: right(self, *given) * self.total


def queue_of_this_rank(right):
    return lambda self, counts, config: (counts[None], 0)


def last_first(right):
    def loads(self, counts, config):
        everywhere, place = right(self, counts, config)
        return everywhere.flip(0), self.group.size - 1 - place

    return loads


def counts_swapped(right):
    def send(self, given, counts):
        return right(self, given, counts.view(self.axis.size, -1).flip(1).flatten())

    return send


def not_sorted_again(right):
    return lambda counts: right(counts) if counts.dim() > 2 else None


def not_sorted_by_rank(right):
    return lambda counts: right(counts) if counts.dim() == 2 else None


def sent_back_unsorted(right):
    return lambda self, rows, way: right(self, rows, (None, way[1]))


def sent_back_by_the_first_order(right):
    """Between machines the order of the way there is applied once more, not undone."""

    def back(self, rows, way):
        *hops, (order, there) = way[1]
        return right(self, rows, (way[0], [*hops, (order.argsort(), there)]))

    return back


def gradients_stay(right):
    """The exchange's backward gives each rank the gradients of the rows that it had, not of those that it sent."""

    def start(self, given, going, coming):
        stand_in = right(self, given, going, coming)
        if going == self.coming and going != self.going:
            part = self.handle.wait()
            self.handle = Done([torch.zeros_like(p) for p in part])
        return stand_in

    return start


class Done:
    def __init__(self, parts):
        self.parts = parts

    def wait(self):
        return self.parts


def summed_over_all(right):
    return lambda self, p: self.axis


def not_summed(right):
    return lambda self, p: Axis() if spec.of(p).expert else self.axis


def experts_not_marked(right):
    return lambda p, **changes: None if "expert" in changes else right(p, **changes)


def load_not_marked(right):
    return lambda p, **changes: None if "load" in changes else right(p, **changes)


def not_balanced(right):
    return lambda pieces, config: None


def bias_on_every_rank(right):
    def forward(self, x):
        self.first = True
        return right(self, x)

    return forward


def router_not_partial(right):
    return lambda axis, *modules, biases=(): right(
        axis, *(m for m in modules if getattr(m, "out_features", 0) != 8), biases=biases
    )


def weights_not_entered(right):
    return lambda self, x: x if x.size(-1) == 2 and x.is_floating_point() else right(self, x)


EP, TP, SP = "dp=2,ep=2", "tp=2", "tp=2,sp=on"
MUTANTS = {
    "losses averaged on each rank": (mixture.Mixture, "losses", loss_of_the_rank_averaged, EP, SMALL),
    "room counted on this rank alone": (expert.SpreadExperts, "loads", queue_of_this_rank, "dp=2", BY_BATCH),
    "later ranks' tokens first": (expert.SpreadExperts, "loads", last_first, "dp=2", BY_BATCH),
    "counts swapped": (expert.SpreadExperts, "send", counts_swapped, EP, SMALL),
    "rows not sorted by expert": (expert, "regrouped", not_sorted_again, EP, SMALL),
    "rows sent back in another order": (expert.SpreadExperts, "back", sent_back_unsorted, EP, SMALL),
    "gradients do not travel": (expert.RowExchange, "start", gradients_stay, EP, SMALL),
    "expert gradients summed over all of dp": (data.Replicas, "axis_of", summed_over_all, EP, SMALL),
    "experts taken for replicas": (spec, "mark", experts_not_marked, EP, SMALL),
    "load bias taken for a weight": (spec, "mark", load_not_marked, EP, BIASED),
    "load bias never moved": (finish, "balance", not_balanced, EP, BIASED),
    "an expert's bias added on every tensor rank": (
        expert.PartialLinear,
        "forward",
        bias_on_every_rank,
        TP,
        SMALL,
    ),
    "router not marked partial": (sequence, "_partial", router_not_partial, SP, SMALL),
    "weights' gradient of one tensor rank": (expert.SpreadExperts, "enter", weights_not_entered, TP, SMALL),
}


# What the serial model does wrong too: a check token by token notices it.
ALONE = {
    "weights forgotten in the backward of combine": (rows.Combine, "backward", weights_forgotten),
    "router gradient lost": (rows.Combine, "backward", router_gradient_lost),
    "gradients of a token's experts not added": (rows.Dispatch, "backward", first_expert_only),
    "room off by one": (mixture.Experts, "room", room_off_by_one),
    "second choices served first": (mixture.Mixture, "room", second_choices_first),
    "losses left out": (mixture.Mixture, "losses", loss_left_out),
    "losses not divided": (mixture.Mixture, "losses", not_divided),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_bug_of_the_serial_mixture_is_noticed(name, monkeypatch):
    torch.set_default_dtype(torch.float64)
    try:
        serial.test_every_token_gets_its_experts_and_the_losses_enter_backward_once("gshard")
        owner, attribute, make = ALONE[name]
        static = isinstance(vars(owner)[attribute], staticmethod)
        wrong = make(getattr(owner, attribute))
        monkeypatch.setattr(owner, attribute, staticmethod(wrong) if static else wrong)
        with pytest.raises(AssertionError):
            serial.test_every_token_gets_its_experts_and_the_losses_enter_backward_once("gshard")
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_bug_is_noticed(ranks, name):
    owner, attribute, make, plan, config = MUTANTS[name]
    try:
        found = is_noticed(ranks, (owner, attribute, make), plan, config)
    except (RuntimeError, AssertionError):
        return  # the ranks refused to go on: noticed
    assert found, f"nobody noticed: {name}"


HIERARCHICAL = {
    "rows not sorted by machine and rank": (expert, "regrouped", not_sorted_by_rank),
    "the order between machines not undone": (expert.SpreadExperts, "back", sent_back_by_the_first_order),
    "rows not sorted by expert": (expert, "regrouped", not_sorted_again),
}


def test_a_bug_of_the_hierarchical_exchange_is_noticed(pools):
    plan = "dp=4,ep=4,node=2"
    assert not is_noticed(pools[4], None, plan, SMALL, 1e-10)
    for name, bug in HIERARCHICAL.items():
        with contextlib.suppress(RuntimeError):  # the ranks refused to go on: noticed
            assert is_noticed(pools[4], bug, plan, SMALL), f"nobody noticed: {name}"


def test_nothing_is_noticed_without_a_bug(ranks):
    for plan, config in ((EP, SMALL), (EP, BIASED), ("dp=2", BY_BATCH), (TP, SMALL), (SP, SMALL)):
        assert not is_noticed(ranks, None, plan, config, 1e-10)
    assert len(MUTANTS) >= 12
