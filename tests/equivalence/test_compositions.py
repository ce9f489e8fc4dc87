"""Strategies together: every pair of axes on 4 ranks, triples on 8, all four on 16, each equal to the serial run."""

import pytest

from gpt2lab.compositions import ALL, PAIRS, TRIPLES, WITH_EXPERTS, plans_by_pair
from gpt2lab.plan import Plan
from gpt2lab.processes.launch import Ranks
from gpt2lab.verify import verify

AXES = ("pipeline", "data", "context", "tensor", "expert")


@pytest.fixture
def four(pools):
    return pools[4]


@pytest.mark.parametrize(
    "composition", (*PAIRS, *WITH_EXPERTS), ids=lambda c: f"{c.plan}{c.router and ' '}{c.router}"
)
def test_pairs_on_four_ranks(four, composition):
    report = verify(composition.plan, composition.config, ranks=four)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("composition", (*TRIPLES, *ALL), ids=lambda c: c.plan)
def test_three_and_four_axes(composition):
    with Ranks(Plan.parse(composition.plan).world, echo=False, timeout=120) as ranks:
        report = verify(composition.plan, composition.config, ranks=ranks)
    assert report.ok, report


def test_the_table_has_every_pair_of_axes_and_every_zero_stage_with_tensor_and_pipeline():
    found = plans_by_pair()
    for a in AXES:
        for b in AXES:
            assert found.get((a, b)), f"no tested plan uses {a} and {b} together"
    for stage in (1, 2, 3):
        assert found[f"ZeRO-{stage}", "tensor"] and found[f"ZeRO-{stage}", "pipeline"]
