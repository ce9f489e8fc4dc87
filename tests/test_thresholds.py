"""Thresholds: at that many tokens a rank computes as long as it sends, and the published formulas come out."""

import pytest
from tensor_cases import of_a_layer

from gpt2lab.lessons.labs.thresholds import laptop, machines, most_tensor_ranks, tokens_per_rank
from gpt2lab.machine.links import Link, all_reduce_time
from gpt2lab.planner.tensor_costs import Shape

MACHINES = (laptop(40e9, 3e9), *machines())


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_backward_takes_as_long_as_the_ring_at_the_threshold_of_data_parallelism(machine):
    weights, tokens = 1e9, tokens_per_rank("data", machine)
    ring = all_reduce_time("ring", machine.ranks, weights * machine.itemsize, Link(0, machine.bandwidth))
    assert 4 * weights * tokens / machine.rate == pytest.approx(ring)
    assert tokens_per_rank("zero3", machine) == tokens
    assert tokens_per_rank("data", machine, ranks=1) == 0


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
def test_a_layer_computes_as_long_as_it_sends_at_the_threshold_of_tensor_parallelism(machine):
    ranks, tokens = 4, 128
    per_width = (most_tensor_ranks(machine, 2048) - 1) / 2048
    width = round((ranks - 1) / per_width) or 1
    sent = of_a_layer(Shape(1, tokens, 10_000, 8, ranks, machine.itemsize)).total() * width / 10_000
    computing = 72 * width**2 * tokens / ranks / machine.rate
    assert computing == pytest.approx(sent / machine.bandwidth, rel=0.5 / width + 1e-6)


def test_the_rings_block_is_that_of_the_paper_and_twice_that_under_a_causal_mask():
    """Liu et al. 2023, section 3: c >= F / B; their table 2 has 1.0 thousand for an A100 with NVLink."""
    _, eight, _ = MACHINES
    block = tokens_per_rank("context", eight)
    assert block == pytest.approx(eight.rate / eight.bandwidth)
    assert tokens_per_rank("context", eight, causal=True) == 2 * block
    with pytest.raises(ValueError, match="most_tensor_ranks"):
        tokens_per_rank("tensor", eight)
