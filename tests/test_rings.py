"""Products in parts while a ring carries the next: equal to the serial model, same bytes, messages under products."""

from contextlib import ExitStack

import pytest
import torch
from planting import is_noticed, planted

from gpt2lab.lessons.labs import rings
from gpt2lab.lessons.labs.instruments import trainer_by
from gpt2lab.parallel import sequence
from gpt2lab.ranks import comm
from gpt2lab.reference import CONFIG, example_batch

ON = (
    sequence,
    "apply_sequence",
    lambda right: lambda model, *how: (right(model, *how), rings.apply_rings(model)),
)


def with_rings(*bugs):
    """What plants rings, and bugs in them."""

    def plant():
        stack = ExitStack()
        for bug in (ON, *bugs):
            stack.enter_context(planted(*bug))
        return stack

    return plant


@pytest.mark.parametrize("plan", ["tp=2,sp=on", "tp=4,sp=on", "pp=2,tp=2,sp=on,micro=3,recompute=on"])
def test_a_model_whose_layers_compute_in_parts_equals_the_serial_one(pools, plan):
    ranks = pools[2 if plan == "tp=2,sp=on" else 4]
    assert not is_noticed(ranks, with_rings(), plan, CONFIG, 1e-10)


def a_step(rank, world_size, parts):
    """Bytes and calls of a step's forward and backward, with rings or without; tokens do not divide by ranks."""
    with with_rings()() if parts else ExitStack():
        trainer = trainer_by(f"tp={world_size},sp=on", CONFIG)
    comm.clear_log()
    trainer.gradients(example_batch(CONFIG, 7, 11))
    calls = [event for event in comm.log if event.axis == "tp"]
    return sum(e.bytes for e in calls), sum(e.bytes for e in calls if e.op == "send"), len(calls)


def test_rings_send_the_bytes_of_gathers_and_sums(pools):
    whole, parts = (pools[4].run(a_step, way) for way in (False, True))
    assert [size for size, *_ in whole] == [size for size, *_ in parts]
    assert all(sent == 0 for _, sent, _ in whole) and all(2 * sent > size for size, sent, _ in parts)


def beside(spans) -> float:
    """The share of a rank's products during which a message is on its way."""
    work, messages = ([s for s in spans if (s.lane == "comm") == lane] for lane in (False, True))
    under = sum(any(m.start < s.end and m.end > s.start for m in messages) for s in work)
    return under / len(work)


def test_messages_travel_under_products(pools):
    whole, parts = (pools[4].run(rings.two_layers, way) for way in (False, True))
    assert all(beside(spans) == 0 for spans in whole)
    assert all(
        beside(spans) >= 6 / 8 for spans in parts
    )  # the last of a gather and the first of a sum are alone


def one_hop_less(right):
    """The ring stops before the last part has come."""
    return lambda x, axis, sizes, use: right(
        x, axis, sizes, lambda place, part: use(place, part * (place != 0))
    )


def own_term_twice(right):
    return lambda term, axis, sizes: right(term, axis, sizes) + term(axis.rank)


def weights_of_the_last_part_alone(right):
    return lambda grad, x, biased: right(grad * (grad.size(1) == 6), x, biased)


BUGS = {
    "a part is lost": (rings, "gathered", one_hop_less),
    "the own term counts twice": (rings, "scattered", own_term_twice),
    "some tokens give the weight no gradient": (rings, "weight_gradients", weights_of_the_last_part_alone),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_noticed(pools, bug):
    assert is_noticed(pools[2], with_rings(BUGS[bug]), "tp=2,sp=on", CONFIG)


def test_a_linear_layer_without_bias_has_no_gradient_of_one(pools):
    def run(rank, world_size):
        from gpt2lab.ranks.mesh import Mesh

        axis = Mesh(tp=world_size)["tp"]
        x, w = torch.ones(1, 2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
        rings.GatheredProduct.apply(x, w, None, axis, [2] * world_size).sum().backward()
        return x.grad.sum().item(), w.grad.sum().item()

    assert pools[2].run(run) == [(48, 48)] * 2
