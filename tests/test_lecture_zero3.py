"""A lecture's ZeRO-3: without its bugs it equals serial, with each of them exactly what the lesson says it is."""

import pytest
import torch

from gpt2lab.lessons.labs.lecture_zero3 import first_weight, serial, zero3

X = torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def equal(found, expected) -> bool:
    return all(log.equals(expected) for log in found)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_without_its_bugs_it_equals_serial(pools, world):
    assert equal(pools[world].run(zero3, X), serial(X))
    assert equal(pools[world].run(zero3, X, replicas=True), serial(X))
    assert not serial(X).equals(serial(X, 1e-6)) and not serial(X).equals(serial(X, frozen=[3]))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_bug_is_the_program_that_the_recursions_say(pools, world):
    bugs = {
        "layer 0": ({"stop": 0}, {"frozen": [0]}),
        "old gradients shrink": ({"clear": False}, {"keep": 1 / world}),
        "old gradients pile up": ({"clear": False, "replicas": True}, {"keep": 1.0}),
        "both": ({"clear": False, "stop": 0}, {"keep": 1 / world, "frozen": [0]}),
    }
    for switches, recursion in bugs.values():
        found = pools[world].run(zero3, X, steps=8, **switches)
        assert equal(found, serial(X, steps=8, **recursion)) and not equal(found, serial(X, steps=8))
        layer_0_stays = torch.equal(found[0].weights[0], first_weight(X).detach())
        assert layer_0_stays == ("stop" in switches)


@pytest.mark.parametrize(("world", "layers"), [(2, 4), (3, 6), (4, 8)])
def test_a_graph_keeps_what_was_borrowed(pools, world, layers):
    """L - L/n layers by the end of forward; without a graph one, while it computes; replicas borrow nothing."""
    foreign = layers - layers // world
    for log in pools[world].run(zero3, X, graph=True, steps=1, layers=layers):
        forward, backward = log.borrowed[: layers + foreign], log.borrowed[layers + foreign :]
        assert (
            forward == sorted(forward) and forward[-1] == foreign and set(forward) >= {*range(1, foreign + 1)}
        )
        assert set(backward) == {foreign, foreign + 1}
    for log in pools[world].run(zero3, X, layers=layers):
        assert log.borrowed.count(1) == 2 * foreign * 5 and set(log.borrowed) == {0, 1}
        assert log.borrowed[-1] == 0
    assert set(pools[world].run(zero3, X, replicas=True)[0].borrowed) == {0}
    assert equal(pools[world].run(zero3, X, graph=True), serial(X))
