"""Bugs in mixtures of experts, planted on the ranks: verification notices each of them."""

from dataclasses import replace

import pytest
import test_experts as serial
import torch
from planting import bugs, is_caught, is_killed

from gpt2lab.experts import mixture, rows
from gpt2lab.parallel import data, expert, finish, sequence, spec
from gpt2lab.reference import EXPERTS

SMALL = replace(EXPERTS, n_layer=2, experts=replace(EXPERTS.experts, balance=0.1, capacity=1.0))
BIASED = replace(SMALL, experts=replace(SMALL.experts, router="deepseek", speed=0.05))
BY_BATCH = replace(SMALL, experts=replace(SMALL.experts, group="batch"))
EP, BIAS, BATCH = ("dp=2,ep=2", SMALL), ("dp=2,ep=2", BIASED), ("dp=2", BY_BATCH)
TP, SP, MACHINES = ("tp=2", SMALL), ("tp=2,sp=on", SMALL), ("dp=4,ep=4,node=2", SMALL)


def unmarked(word):
    return lambda right: lambda p, **changes: None if word in changes else right(p, **changes)


def regrouped(wrong):
    return lambda right: lambda counts: right(counts) if not wrong(counts.dim()) else None


def of_this_rank(right):
    return lambda self, counts: (counts[None], 0)


def second_choices_first(right):
    def room(self, experts):
        kept, share = right(self, experts.flip(-1))
        return kept.flip(-1), share

    return room


BUGS = {
    "losses averaged on each rank":
        (mixture.Mixture.losses, "(self.total or scores[..., 0].numel())", "scores[..., 0].numel()", EP),
    "room counted on this rank alone": (expert.SpreadExperts, "loads", of_this_rank, BATCH),
    "later ranks' tokens first":
        (expert.SpreadExperts.loads, "counts.shape), self.group.rank",
         "counts.shape).flip(0), self.group.size - 1 - self.group.rank", BATCH),
    "counts swapped":
        (expert.SpreadExperts.send, "self.inside.size, -1)", "self.inside.size, -1).flip(2)", EP),
    "rows not sorted by expert": (expert, "regrouped", regrouped(lambda dim: dim == 2), EP),
    "rows sent back in another order":
        (expert.SpreadExperts.back, "order, hops = way", "order, hops = None, way[1]", EP),
    "gradients do not travel":
        (expert.RowExchange.start, "rows.split(going)",
         "(rows * (going != self.coming or going == self.going)).split(going)", EP),
    "expert gradients summed over all of dp":
        (data.Replicas.axis_of, "self.experts if spec.of(p).expert else", "", EP),
    "experts taken for replicas": (spec, "mark", unmarked("expert"), EP),
    "load bias taken for a weight": (spec, "mark", unmarked("load"), BIAS),
    "load bias never moved": (finish, "balance", lambda right: lambda pieces, config: None, BIAS),
    "an expert's bias added on every tensor rank": (expert.PartialLinear.forward, " * self.first", "", TP),
    "router not marked partial": (sequence.apply_sequence, "*routers, ", "", SP),
    "weights' gradient of one tensor rank":
        (mixture.Mixture.forward, "self.ranks.enter(weights)", "weights", TP),
    "rows not sorted by machine and rank": (expert, "regrouped", regrouped(lambda dim: dim > 2), MACHINES),
    "the order between machines not undone":  # but applied once more
        (expert.SpreadExperts.back, "sent), order, back=True)",
         "sent), order, back=there.axis is not self.between)", MACHINES),
    "rows of other machines not sorted by expert":
        (expert, "regrouped", regrouped(lambda dim: dim == 2), MACHINES),
}  # fmt: skip


@bugs(BUGS)
def test_the_bug_is_noticed(pools, bug, check):
    assert is_caught(pools, bug, *check), "nobody noticed"


@pytest.mark.parametrize("check", [EP, BIAS, BATCH, TP, SP, MACHINES], ids=lambda check: check[0])
def test_nothing_is_noticed_without_a_bug(pools, check):
    assert not is_caught(pools, None, *check, 1e-10)


# What the serial model does wrong too: a check token by token notices it.
TOKENS = (serial.test_every_token_gets_its_experts_and_the_losses_enter_backward_once, "gshard")
ALONE = {
    "weights forgotten in the backward of combine":
        (rows.Combine.backward, "grad * weights[:, None],", "grad,", TOKENS),
    "router gradient lost":
        (rows.Combine.backward, "(grad * rows).sum(-1)", "torch.zeros_like(weights)", TOKENS),
    "gradients of a token's experts not added": (rows.Dispatch.backward, "index_add_", "index_copy_", TOKENS),
    "room off by one": (mixture.Experts.room, "return min(", "return 1 + min(", TOKENS),
    "second choices served first": (mixture.Mixture, "room", second_choices_first, TOKENS),
    "losses left out":
        (mixture.Mixture, "losses", lambda right: lambda self, *given: right(self, *given) * 0, TOKENS),
    "losses not divided":
        (mixture.Mixture.losses, "loss / (self.total or scores[..., 0].numel())", "loss", TOKENS),
}  # fmt: skip


@bugs(ALONE)
def test_a_bug_of_the_serial_mixture_is_noticed(bug, check):
    torch.set_default_dtype(torch.float64)
    assert is_killed(bug, check), "nobody noticed"
