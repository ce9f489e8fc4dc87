"""Operators whose cut needs messages inside, on live ranks: convolution with its halo, attention along the keys."""

import pytest
import torch
import torch.nn.functional as F
from sharding_cases import check_program, image, program

from gpt2lab.sharding.capture import capture
from gpt2lab.sharding.gpt2 import plain_attention
from gpt2lab.sharding.propagate import Mark

IMAGES = [
    ({"x": "h:x"}, {"x": 2}, 11, (3, 3)),
    ({"x": "h:x"}, {"x": 3}, 11, (3, 2)),
    ({"x": "h:x"}, {"x": 4}, 13, (2, 3)),
    ({"x": "h:x"}, {"x": 4}, 9, (5, 1)),  # the halo reaches over more than one neighbour
    ({"x": "h:x, w:y"}, {"x": 2, "y": 2}, 7, (3, 3)),
    ({"x": "h:x, n:y"}, {"x": 2, "y": 2}, 7, (3, 3)),
    ({"x": "h:x", "weight": "o:y"}, {"x": 2, "y": 2}, 7, (3, 3)),
    ({"x": "c:x"}, {"x": 2}, 7, (3, 3)),
]


@pytest.mark.parametrize("marks, mesh, height, kernel", IMAGES, ids=str)
def test_a_convolution_is_equal_along_every_cut(pools, marks, mesh, height, kernel):
    whole, given, want = image(height, kernel)
    one = program(marks, mesh, whole)
    check_program(pools, one, given, want)
    halos = [axis for kind, axis, _ in one.changes() if kind == "halo"]
    assert halos.count("x") == (3 if "h:x" in marks["x"] else 0)  # forward, again for the filters, and back


def test_a_halo_of_three_rows_sends_two_rows_at_each_border():
    whole, _, _ = image(12, (3, 3))
    one = program({"x": "h:x"}, {"x": 2}, whole)
    row = 2 * 4 * 9 * 8
    halos = [
        [step.cost(one.mesh, {"x": r}) for step in one.steps if getattr(step, "halo", None)] for r in (0, 1)
    ]
    both = [tuple(map(sum, zip(*pair, strict=True))) for pair in zip(*halos, strict=True)]
    assert both == [(2 * row, 2)] * 3  # 6 + 6 rows make 5 + 5: one row up, one down, forward and backward


def attention(q, k, v, grad):
    y = plain_attention(q, k, v, torch.arange(7))
    return y, *torch.autograd.grad(y, (q, k, v), grad)


def test_attention_along_the_keys_sends_a_maximum_and_sums(pools):
    """Keys and values lie cut, queries whole: a maximum and a sum a query, and the result as a partial sum."""
    generator = torch.Generator().manual_seed(0)
    given = {
        n: torch.randn(2, 3, 7, 4, generator=generator, dtype=torch.float64)
        for n in ("q", "k", "v", "grad y")
    }
    leaves = [given[n].requires_grad_() for n in "qkv"]
    names = {n: ("b", "h", "s" if n in "kv" else "t", "d") for n in given}
    whole = capture(attention, given, ["y", "grad q", "grad k", "grad v"], names)
    right = F.scaled_dot_product_attention(*leaves, is_causal=True)
    want = dict(
        zip(["grad q", "grad k", "grad v"], torch.autograd.grad(right, leaves, given["grad y"]), strict=True)
    )
    given, want = {n: v.detach() for n, v in given.items()}, want | {"y": right.detach()}
    for ranks in (2, 3):
        one = program({"k": Mark("s:x"), "v": Mark("s:x"), "q": Mark("", closed=True)}, {"x": ranks}, whole)
        shapes = [(kind, whole.nodes[value].shape) for kind, _, value in one.changes()]
        row, wide = ("all-reduce", (2, 3, 7)), ("all-reduce", (2, 3, 7, 4))
        assert shapes == [
            row,
            row,
            wide,
            row,
            wide,
        ]  # maximum, sum, y; the row sum of softmax's backward, grad q
        check_program(pools, one, given, want)
