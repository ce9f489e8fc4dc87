"""Lesson 18: a bit flipped in a weight is found by digests, one in a local gradient only by computing again."""

import pytest
from lesson_cells import definitions

from gpt2lab.lessons.exercises.replicas import odd_ones

NAME = "h.2.mlp.c_fc.weight"
SEEN = ["0", "1", "1"]  # where each rank repeats the one before it, and rank 1 is broken


def three(pools, *bugs):
    """Per place of the bit: what the replicas hold, as digests, and the bytes sent by each."""
    run = definitions("18", "def steps(", "def three_replicas(", bugs=bugs)["three_replicas"]
    found = {where: pools[3].run(run, where) for where in ("nothing", "a weight", "a local gradient")}
    for of_ranks in found.values():
        assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
    return {where: of_ranks[0] for where, of_ranks in found.items()}


def test_digests_find_a_weight_and_no_gradient(pools):
    found = three(pools)
    held = {where: digests for where, (digests, _) in found.items()}
    said = {where: odd_ones.right(digests) for where, digests in held.items()}
    assert said == {"nothing": [], "a weight": [(1, NAME)], "a local gradient": []}
    assert held["a local gradient"][0][NAME] != held["nothing"][0][NAME]
    assert {size for _, size in found.values()} == {2 * 8 * len(held["nothing"][0])}


def differing(pools, micro, *bugs):
    """How many gradients differ where each rank repeats the one before it, with rank 1 broken."""
    run = definitions("18", "def three_replicas(", "def again(", bugs=bugs)["again"]
    return [said.split(": ")[1].split()[0] for said in pools[3].run(run, micro)]


def test_computing_again_finds_the_gradient_and_the_rank_and_needs_equal_bits(pools):
    assert differing(pools, 1) == SEEN
    assert differing(pools, 2) == ["most"] * 3


def test_mutant_digests_that_do_not_read_the_first_number_see_no_weight(pools):
    digests, _ = three(pools, (".tobytes()", ".tobytes()[8:]"))["a weight"]
    assert odd_ones.right(digests) == []


@pytest.mark.parametrize(
    "bug",
    [
        ("(rank - 1) % world_size", "(rank + 1) % world_size"),
        ("(NAME).register_hook(lab.flipped)", "(NAME).register_hook(torch.clone)"),
        (
            "return digests(p.tensor.grad for",
            "one.parallel.sync.finish()\n        return digests(p.tensor.grad for",
        ),
    ],
    ids=["the rows of another rank", "a sound chip", "digests of the sum"],
)
def test_mutant_of_computing_again_says_something_else(pools, bug):
    assert differing(pools, 1, bug) != SEEN
