"""What is read off an operator's description: its free cuts, partial sums, messages inside, halos."""

import itertools

import pytest
import torch

from gpt2lab.sharding import operators
from gpt2lab.sharding.describe import analyse
from gpt2lab.sharding.expression import apply
from gpt2lab.sharding.operators import LIBRARY

FREE = {
    "matmul": "i:S0 j:S1 k:sum",
    "add": "i:S0 j:S1",
    "gelu": "i:S0 j:S1",
    "sum of rows": "i:sum j:S0",
    "softmax": "i:S0",
    "layer norm": "i:S0",
    "embedding": "b:S0 c:S2 row0:sum s:S1",
    "attention": "b:S0 e:S3 h:S1 t:S2",
    "cross entropy": "i:sum",
    "convolution": "c:sum n:S0 o:S1",
}
INSIDE = {
    "softmax": {"j": {("max", "i"), ("sum", "i")}},
    "layer norm": {"j": {("sum", "i")}},
    "attention": {"s": {("sum", "beht"), ("max", "bht"), ("sum", "bht")}, "d": {("sum", "bhst")}},
    "cross entropy": {"row0": {("max", "i"), ("sum", "i")}},
}


@pytest.mark.parametrize("name", LIBRARY)
def test_the_options_of_an_operator_follow_from_its_expression(name):
    rule = analyse(LIBRARY[name])
    cuts = [o for o in rule.options if o.index not in ("", "partial")]
    result = lambda place: f"S{place}" if isinstance(place, int) else place
    assert " ".join(sorted(f"{o.index}:{result(o.output)}" for o in cuts if o.free)) == FREE[name]
    inside = {o.index: {(op, "".join(i)) for op, i in o.messages} for o in cuts if o.messages}
    assert inside == INSIDE.get(name, {})
    assert {o.index for o in cuts if o.halos} == ({"h", "v"} if name == "convolution" else set())


def linear_in(name) -> set:
    return {
        tuple(n for n, at in enumerate(o.inputs) if at == "sum")
        for o in analyse(LIBRARY[name]).options
        if o.index == "partial"
    }


def test_where_the_result_is_linear_it_may_stay_partial():
    assert linear_in("matmul") == {(0,), (1,)} and linear_in("add") == {(0, 1)}
    assert linear_in("gelu") == linear_in("softmax") == linear_in("cross entropy") == set()
    assert (
        linear_in("layer norm") == {(1, 2)}
        and linear_in("attention") == {(2,)}
        and linear_in("embedding") == {(0,)}
    )


def test_a_bias_is_a_term_of_the_sum():
    rule = operators.rule("addmm", ((4,), (3, 5), (5, 4)), (3, 4))
    (inner,) = [o for o in rule.options if o.index == "k"]
    assert inner.inputs == ("sum", 1, 0) and inner.output == "sum"


def test_a_broadcast_operand_stays_whole():
    rule = operators.rule("mul", ((3, 4), (3, 1)), (3, 4))
    assert rule.inputs == (("i0", "i1"), ("i0", None))
    assert [o.inputs for o in rule.options if o.index == "i1"] == [(1, None)]


def test_a_number_that_is_added_is_no_term():
    assert not [o for o in operators.rule("add", ((3,), None), (3,)).options if o.index == "partial"]
    assert [o for o in operators.rule("mul", ((3,), None), (3,)).options if o.index == "partial"]


def cut_by_hand(option, tensors, parts, function):
    """The result put together from parts that were computed apart, as an option says."""
    cut = lambda t, place, r: t.tensor_split(parts, place)[r] if isinstance(place, int) else t
    found = [
        function(*(cut(t, at, r) for t, at in zip(tensors, option.inputs, strict=True))) for r in range(parts)
    ]
    return torch.cat(found, option.output) if isinstance(option.output, int) else sum(found)


EINSUMS = [
    "ik,kj->ij",
    "bik,bkj->bij",
    "bthd,bshd->bhts",
    "ij,ij->i",
    "ij,j->i",
    "ijk,kl->ijl",
    "i,j->ij",
    "ij->j",
]


@pytest.mark.parametrize("text", EINSUMS)
def test_every_free_cut_of_an_einsum_gives_its_result(text):
    inputs, output = text.split("->")
    terms, sizes = inputs.split(","), dict(zip("bijklthsd", (3, 4, 5, 6, 4, 3, 5, 4, 6), strict=True))
    tensors = [torch.randn([sizes[i] for i in term], dtype=torch.float64) for term in terms]
    rule = operators.einsum(text)
    cuts = [o for o in rule.options if o.free and o.index not in ("", "partial")]
    assert len(cuts) == len(set(inputs) - {","})
    for option, parts in itertools.product(cuts, (2, 3)):
        found = cut_by_hand(option, tensors, parts, lambda *t: torch.einsum(text, *t))
        assert torch.allclose(found, torch.einsum(text, *tensors), rtol=1e-13, atol=1e-13)


def test_two_indices_of_the_result_over_one_dimension_cannot_be_cut():
    outer = analyse(lambda x: lambda i, j: apply(x[i], x[j]))
    assert [o.index for o in outer.options] == [""]
