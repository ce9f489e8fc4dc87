"""Weights from a training plan's layout to a sampling plan's: the same numbers, and exactly what each rank lacks."""

from dataclasses import replace

import pytest
import torch
from planting import under

from gpt2lab.lessons.labs import handover
from gpt2lab.lessons.labs.instruments import built, bytes_sent, trainer_by
from gpt2lab.model import GPT2
from gpt2lab.ranks import comm
from gpt2lab.reference import CONFIG, example_batch

WAYS = [
    ("pp=2,tp=2,micro=2", "tp=4"),
    ("dp=4,zero=3", "dp=2,tp=2"),
    ("pp=4,micro=4", "dp=4"),
    ("dp=2,tp=2,sp=on,zero=1", "pp=2,dp=2"),
]
TEXTS = [[(3 * row + 7 * t) % 37 for t in range(9)] for row in range(5)]


def a_step(rank, world_size, trains, samples):
    """Log-probabilities of texts on both models after a step and a handover, and texts that each writes."""
    trainer, sampler = both = trainer_by(trains), trainer_by(samples)
    hand_over = handover.Handover(trainer.parallel, sampler.parallel)
    hand_over()
    trainer.step(example_batch(CONFIG, 7, 11))
    hand_over()
    written = [t.parallel.generate([[1, 2], [3, 4]], 6, stop=None, temperature=0) for t in both]
    return [handover.log_probabilities(t, TEXTS) for t in both], written


def differ(pool, plans, bug=None) -> bool:
    found = pool.run(under(bug, a_step), *plans)
    off = [abs(a - b) for (before, after), _ in found for a, b in zip(before, after, strict=True)]
    return not all(o < 1e-10 for o in off) or any(before != after for _, (before, after) in found)


@pytest.mark.parametrize("plans", WAYS, ids=" to ".join)
def test_texts_and_log_probabilities_are_the_same_on_both_plans(pools, plans):
    assert not differ(pools[4], plans)


def numbered(rank, world_size, trains, samples, config=CONFIG):
    """The numbers of the elements that a rank held, those that it wants, those it has, and the bytes that it sent."""
    source, target = built(trains, config), built(samples, config)
    last, ids = 0, {}
    for name, p in GPT2(config).named_parameters():
        ids[name] = torch.arange(last, last + p.numel(), dtype=torch.float64).view_as(p)
        last += p.numel()
    source.load(ids), target.load(ids)
    numbers = lambda model: torch.cat(
        [torch.empty(0), *(p.tensor.detach().flatten() for p in model.sync.pieces)]
    )
    had, wants = numbers(source).clone(), numbers(target).clone()
    target.load({name: -1 - 0 * number for name, number in ids.items()})
    hand_over = handover.Handover(source, target)
    comm.clear_log()
    hand_over()
    return had.tolist(), wants.tolist(), numbers(target).tolist(), bytes_sent()


def gets_what_it_lacks(found):
    """Nothing else travels."""
    assert all(wants == has for _, wants, has, _ in found)
    lacking = sum(len(set(wants) - set(had)) for had, wants, *_ in found)
    assert sum(sent for *_, sent in found) == 8 * lacking > 0


@pytest.mark.parametrize("trains, samples", WAYS)
def test_every_rank_gets_what_it_lacks_and_nothing_else_travels(pools, trains, samples):
    gets_what_it_lacks(pools[4].run(numbered, trains, samples))


@pytest.mark.parametrize("trains, samples", [("dp=6,zero=3,data=owner", "pp=3,dp=2"), ("pp=6", "dp=3,tp=2")])
def test_who_holds_nothing_gets_what_it_lacks(pools, trains, samples):
    found = pools[6].run(numbered, trains, samples, replace(CONFIG, n_layer=1))
    assert not all(had for had, *_ in found)
    gets_what_it_lacks(found)


def test_those_who_hold_the_same_share_the_sending():
    everything, left, right = (("w", (0, at), (4, wide)) for at, wide in ((0, 6), (0, 3), (3, 3)))
    found = handover.moves([[everything], [everything], [], []], [[], [], [everything], [left]])
    assert found == [(0, 2, *everything), (1, 3, *left)]
    assert handover.moves([[left], [right]], [[everything], [left]]) == [(1, 0, *right), (0, 1, *left)]
    assert handover.moves([[left], [right]], [[left], [right]]) == []
    assert handover.moves([[("b", (), ())], []], [[], [("b", (), ())]]) == [(0, 1, "b", (), ())]


def once(right):
    def call(self):
        if not hasattr(self, "done"):
            self.done = True
            right(self)

    return call


def without_the_first_third(right):
    lost = "h.4.attn.c_attn.weight", (0, 0)
    return lambda *given: [move for move in right(*given) if move[2:4] != lost]


def without_the_first_source(right):
    return lambda boxes, sources: right(boxes, sources[1:])


BUGS = {
    "weights of the step before are sent": (handover.Handover, "__call__", once),
    "a third of a matrix is lost": (handover, "moves", without_the_first_third),
    "what a rank has it does not use": (handover, "product", without_the_first_source),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_noticed(pools, bug):
    assert differ(pools[4], WAYS[0], BUGS[bug])
