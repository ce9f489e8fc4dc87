"""Copies of busy experts: ranks balance, output and gradients stay the serial ones, and what travels is as computed."""

import random
from dataclasses import replace

import pytest
import torch
from planting import all_planted

from gpt2lab.experts.mixture import Experts, Mixture
from gpt2lab.lessons.labs import copies
from gpt2lab.parallel import expert
from gpt2lab.reference import CONFIG

CONFIG = replace(CONFIG, experts=Experts(8, 2, balance=0.0, shared=1))


def serial():
    """A mixture, tokens that look alike so that some experts are busy, a gradient; output and gradients of all."""
    torch.manual_seed(0)
    mixture = Mixture(CONFIG, 0).double()
    x, grad = (torch.randn(7, 11, 24, dtype=torch.float64) for _ in "xg")
    x = (x + 1).requires_grad_()
    y = mixture(x)
    y.backward(grad)
    right = {n: p.grad for n, p in mixture.named_parameters()} | {"x": x.grad}
    mixture.zero_grad()
    return mixture, x.detach(), grad, y.detach(), right


def with_bugs(rank, world_size, bugs, *given):
    with all_planted(*bugs):
        return copies.run(rank, world_size, CONFIG, *given)


def error(pool, room, *bugs) -> float:
    """The largest difference from the serial mixture of outputs and of all gradients that any rank holds."""
    mixture, x, grad, y, right = serial()
    found = pool.run(with_bugs, bugs, mixture, x, grad, room)
    off = [(torch.cat([ours for ours, *_ in found]) - y).abs().max().item()]
    for rank, (_, gradients, *_) in enumerate(found):
        mine = right | {"x": right["x"].tensor_split(4)[rank]}
        mine = {n: g for n, g in mine.items() if not n.startswith("shared")}  # summed by data parallelism
        off += [(g - mine[n]).abs().max().item() for n, g in gradients.items() if n in mine]
    return max(off)


def test_every_expert_has_a_place_and_none_two_on_a_rank():
    chance = random.Random(0)
    for _ in range(200):
        ranks, count = chance.randint(1, 5), chance.randint(1, 9)
        room = chance.randint(-(-count // ranks), count)
        load = [int(chance.paretovariate(1)) for _ in range(count)]
        held = copies.dealt(load, ranks, room)
        assert all(len(set(experts)) == len(experts) == room for experts in held)
        assert set().union(*held) == set(range(count))
    assert copies.dealt([60, 10, 10, 10, 10, 10, 5, 5], 4, 3) == [[0, 2, 1], [0, 3, 1], [0, 4, 6], [0, 5, 7]]


@pytest.mark.parametrize("room", [0, 2, 3, 4])
def test_output_and_gradients_are_those_of_the_mixture_without_copies(pools, room):
    assert error(pools[4], room) < 1e-12


def test_copies_balance_the_ranks_and_what_travels_is_as_computed(pools):
    mixture, x, grad, *_ = serial()
    before, after = (pools[4].run(with_bugs, (), mixture, x, grad, room) for room in (0, 3))
    load = before[0][2]
    held = copies.dealt(load, 4, 3)
    assert load == after[0][2] and sum(load) == 7 * 11 * 2
    most = [max(rows for *_, rows, _ in found) / (sum(load) / 4) for found in (before, after)]
    assert most[0] > 1.5 and most[1] < 1.15
    weights = sum(p.numel() for p in mixture.experts["0"].parameters()) * 8
    owners = [[r for r in range(4) if e in held[r]] for e in range(8)]
    for rank, (*_, sent) in enumerate(after):
        assert sent[0] == weights * sum(len({*owners[e]} - {rank}) for e in (2 * rank, 2 * rank + 1))
        shared = sum(2 * (len(owners[e]) - 1) / len(owners[e]) for e in held[rank])
        assert sent[2] == pytest.approx(weights * shared, abs=8 * 8 * 8)  # stretches of a ring may be uneven
    asked = [mixture.route(part)[2].flatten().bincount(minlength=8).tolist() for part in x.tensor_split(4)]
    for places, found in (([[2 * r, 2 * r + 1] for r in range(4)], before), (held, after)):
        rows = [[0] * 4 for _ in range(4)]
        for rank in range(4):
            for e, count in enumerate(asked[rank]):
                homes = [r for r in range(4) if e in places[r]]
                for i, home in enumerate(homes[-rank % len(homes) :] + homes[: -rank % len(homes)]):
                    rows[rank][home] += count // len(homes) + (i < count % len(homes))
        assert [sum(column) for column in zip(*rows, strict=True)] == [computed for *_, computed, _ in found]
        sizes = expert.bytes_sent(rows, 24, 4 * len(places[0]), 8)
        assert [size for size, _ in sizes] == [sent[1] for *_, sent in found]


BUGS = {
    "gradients of copies are not summed": (copies, "sum_copies", lambda right: lambda *given: None),
    "rows come back in the order of places": (
        copies.CopiedExperts,
        "back",
        lambda right: lambda self, rows, way: super(copies.CopiedExperts, self).back(rows, way[0]),
    ),
    "a copy keeps the weights of another expert": (
        copies,
        "vector_to_parameters",
        lambda right: lambda *given: None,
    ),
    "every row goes to all copies' first place": (
        copies.CopiedExperts,
        "shares",
        lambda right: lambda self, e, n: torch.full((n,), self.places[(e + 1) % 8][0]),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_noticed(pools, bug):
    assert not error(pools[4], 3, BUGS[bug]) < 1e-6
