"""The algebra beside PyTorch's DTensor: result layouts and bytes of random einsums, and a block of GPT-2."""

import dtensor_cases as cases
import pytest
from sharding_cases import layout

from gpt2lab.benchmarks import race
from gpt2lab.benchmarks import sharding as bench
from gpt2lab.model import GPT2Config

PAIRS = 300


def test_dtensor_never_sends_less_and_each_difference_has_a_reason(pools):
    """DTensor's result layout is always one of ours, for as many bytes or more."""
    found = cases.count_kinds(cases.cases(PAIRS), pools[4])
    assert found.total() == PAIRS and set(cases.KINDS) - set(found) <= {cases.REFUSED}
    assert found[cases.EQUAL] > PAIRS / 2 and found[cases.REFUSED] < PAIRS / 20


def test_a_result_that_the_algebra_does_not_know_is_refused():
    case = cases.cases(1)[0]
    dims = len(case.terms[-1])
    with pytest.raises(ValueError, match="DTensor sent -1 elements"):
        cases.kind(case, cases.Layout.whole(dims), -1)


def test_placements_are_layouts_in_other_words():
    for one in layout.layouts(3, list(cases.MESH)):
        if all(list(cut) == sorted(cut) for cut in one.cuts):
            assert cases.layout_of(cases.dtensor_placements(one), 3) == one


def test_a_block_cut_by_two_marks_sends_what_dtensor_sends(pools):
    config = GPT2Config(vocab_size=37, n_positions=16, n_layer=1, n_head=4, n_embd=24)
    block, program = bench.block_program(config, 3, 5, 2)
    ((*_, first), _) = pools[2].run(race.on_rank, bench.contest, (block, program, 3, 5, config, "gloo"), 1, 0)
    assert first["ours"] == first["theirs"] == (4 * 3 * 5 * 24, 4)
    assert first["apart"] < 1e-4
